# SPDX-License-Identifier: Apache-2.0
"""Base of decoder models: caches, and calls that change a cache only if they return."""

from __future__ import annotations

from typing import Any

import torch

from ..nn.blocks import Stack
from ..nn.cache import DecoderCache, KeyValueCache
from ..nn.paged_cache import PagedCache
from ._output import Output


class Decoder:
    """A model with a stack ``decoder`` and a KV cache."""

    decoder: Stack
    config: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Call the model and its hooks in a transaction of the cache ``past_key_values``."""
        cache: DecoderCache | None = kwargs.get("past_key_values")
        if cache is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with cache.transaction():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def make_cache(
        self, max_length: int | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueCache:
        """Return a cache for ``past_key_values`` with one buffer per sequence.

        Args:
            max_length: None means the config's.
            dtype: None, or torch.float8_e4m3fn or torch.int8, half the memory of bfloat16
                (docs/generation.md).

        Raises:
            ValueError: neither the argument nor the config has a length.
        """
        longest = getattr(self.config, "max_length", None) if max_length is None else max_length
        if longest is None:
            raise ValueError(
                f"{type(self).__name__}.make_cache: give max_length; its positions are relative and"
                " have no end"
            )
        return KeyValueCache(len(self.decoder.blocks), longest, dtype)

    def make_paged_cache(
        self, num_pages: int, page_size: int = 64, dtype: torch.dtype | None = None
    ) -> PagedCache:
        """Return a paged cache for ``past_key_values``; common prefixes share pages.

        Args:
            dtype: as in :meth:`make_cache`.
        """
        return PagedCache(len(self.decoder.blocks), num_pages, page_size, dtype)
