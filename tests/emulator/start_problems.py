# SPDX-License-Identifier: Apache-2.0
"""Calls on a part of a larger problem have the dropout mask of the larger problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from support.attention_check import check_slices, check_starts
from support.dropout_check import check_hidden_starts, check_norm_starts

RAW_OP = "attention_fwd"


class Problem(NamedTuple):
    name: str
    check: Callable[[], None]


def problems() -> Iterator[Problem]:
    yield Problem("sequences and heads", lambda: check_slices("cuda"))
    # The sm_90a kernels, from bits drawn in advance; packed, drawn in each pass.
    yield Problem("sequences and heads, bits", lambda: check_slices("cuda", torch.bfloat16))
    yield Problem(
        "sequences and heads, packed", lambda: check_slices("cuda", torch.bfloat16, packed=True)
    )
    # Tiles of a mask begin before its first key.
    yield Problem("tiles of a mask", lambda: check_starts("cuda", "none", torch.float16, "tiles"))
    yield Problem("rows", lambda: check_norm_starts("cuda", 33))
    yield Problem("hidden", lambda: check_hidden_starts("cuda", (32,), torch.bfloat16))


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        problem.check()
    except (RuntimeError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    return []
