# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: ``register()``, then ``attn_implementation="pytransformer"``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

NAME = "pytransformer"
INSTALL = "run pip install transformers"


def register(name: str = NAME) -> None:
    """Register this package as ``attn_implementation=name`` in transformers' attention interface.

    It registers the attention and its mask function
    (:mod:`pytransformer.integrations.hugging_face`). Models that request ``name`` are checked when
    they are built; one that computes attention outside the interface raises ValueError. Other
    implementations are unchanged. Idempotent; importing the package does not register it. A pickled
    model registers the name on load, also in a spawned process. :func:`switch` changes a model that
    is already built.

    Raises:
        ImportError: transformers is not installed, or too old for the interfaces.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"pytransformer: attn_implementation={name!r} needs transformers; {INSTALL} ({error})"
        ) from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from . import hugging_face
        from .hugging_face import models
    except ImportError as error:
        raise ImportError(
            f"pytransformer: attn_implementation={name!r} cannot be registered with transformers"
            f" {transformers.__version__}: {error}; transformers >= 5.17 is supported"
        ) from error
    AttentionInterface.register(name, hugging_face.attention_forward)
    AttentionMaskInterface.register(name, hugging_face.attention_mask)
    models.watch(hugging_face.attention_forward)
    models.pickle_with_name(hugging_face.attention_forward, _rebuild)


def _rebuild(name: str, build: Any, arguments: tuple[Any, ...]) -> Any:
    """Register the name if it is unknown, then build the config from its pickle.

    copy.deepcopy rebuilds configs too, and then the name may have the user's mask function.
    """
    from transformers import AttentionInterface

    if name not in AttentionInterface():
        register(name)
    return build(*arguments)


def switch(model: Any, name: str = NAME) -> None:
    """Call ``model.set_attn_implementation(name)`` for the model and the models inside it.

    transformers 5.17 does not switch T5's encoder and decoder, which have copies of the config.

    Raises:
        ValueError: the model has no model of transformers; or ``name`` is ours, and the
            model or an inner one computes attention outside the interface; no model has changed.
    """
    from transformers import PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from . import hugging_face
    from .hugging_face import models

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not parts:
        raise ValueError(
            f"switch: model must be or contain a model of transformers, got {type(model).__name__};"
            " pytransformer.activate() and integrations.convert serve other modules"
        )
    if ALL_ATTENTION_FUNCTIONS.get(name) is hugging_face.attention_forward:
        for part in parts:
            models.check(part)
    for part in parts:
        part.set_attn_implementation(name)


def growing_cache(model: Any) -> Any:
    """Return an empty cache for ``model.generate(..., past_key_values=growing_cache(model))``.

    A ``DynamicCache`` copies all keys and values for each token. This cache allocates a quarter
    more memory and writes the token in place. For an encoder-decoder it is an
    ``EncoderDecoderCache``. It works with any ``attn_implementation``. transformers 5.24 names the
    keyword ``cache``.
    """
    from .hugging_face.growing import growing_cache

    return growing_cache(model.config)


def fused_loss(model: Any) -> None:
    """Let ``model(**inputs, labels=...)`` compute its loss without storing logits, in training.

    It serves causal, masked and encoder-decoder language models, also in transformers' ``Trainer``
    with gradient accumulation (``num_items_in_batch``). The output then has no logits. In eval
    mode, with ``shift_labels``, ``logits_to_keep`` or a router's loss, and while the output layer
    has hooks, adapters or sharded weights, the model's own forward runs. ``del model.forward`` ends
    it.

    Raises:
        ValueError: the model changes its logits other than by a softcap, or its loss is not the
            cross entropy of its output layer; the model has not changed.
    """
    from .hugging_face.loss import FusedLoss

    model.forward = FusedLoss(model)


@contextlib.contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Run transformers' ``model.generate_batch(prompts)`` on our kernels inside the block.

    The model's attention has another name meanwhile, which supports nothing else; see
    :mod:`.hugging_face.paged`.

    Raises:
        ImportError: transformers lacks this form of continuous batching, which 5.23 has.
        ValueError: the model computes attention outside the interface.
    """
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.generation.continuous_batching import (  # noqa: F401
            cache_allocators,  # requires 5.23
        )

        from .hugging_face import models, paged
    except ImportError as error:
        raise ImportError(
            "pytransformer: continuous_batching needs transformers >= 5.23; update it, or use"
            " Batcher"
        ) from error
    AttentionInterface.register(paged.NAME, paged.paged_attention_forward)
    models.check(model)
    configs = {
        id(part.config): part.config
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = paged.NAME
        yield model
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
