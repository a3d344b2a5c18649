# SPDX-License-Identifier: Apache-2.0
"""append_kv into 8-bit caches on the backend "cuda", bit for bit; a GPU runs these too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from page_problems import BF16, F16, F32, Problem

from support import rotary_eight_bits

RAW_OP = "append_kv"
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
# Full rows of 4 and 16 lanes, and other rows; dtypes of the cache and the query, columns, pages,
# rotated columns.
CASES = {
    "whole rows in pages": (E4M3, BF16, (64, 24), 4, 32),
    "whole rows": (INT8, F16, (48, 64), None, 0),
    "wide rows": (E4M3, F32, (256, 128), 3, 256),
    "any rows in pages": (INT8, BF16, (34, 5), 1, 10),
    "any rows": (E4M3, F16, (13, 18), None, 0),
}


def problems(device: str = "cpu") -> Iterator[Problem]:
    for name, case in CASES.items():
        yield Problem(
            name, lambda case=case: not rotary_eight_bits.wrong("cuda", *case, device=device)
        )


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        return [] if problem.check() else ["other bits than quantize_kv gives"]
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}"]
