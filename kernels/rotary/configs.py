# SPDX-License-Identifier: Apache-2.0
"""Rows per program of rotary, chosen by registers (tests/triton/resources.json), not by time on a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .._lang import INTERPRETED

MOST_COLUMNS = 4096  # columns per row, which a program holds completely
MOST_ROWS = 2**31 - 2**14  # over all heads, and positions of a cache: 32-bit indices
# Bytes per tile: 16 values of 16 bits per thread, and as many of each table. Twice the float32 size
# spills on sm_100 and sm_120.
BYTES = 4096
INTERPRETED_NUMBERS = 8192  # the interpreter's time depends on operations, not on elements
WARPS = 4
MOST_REGISTERS = 128  # per thread, in backward


@dataclass(frozen=True)
class Kind:
    """Compile-time constants of a kernel: ROWS rows of up to BH pairs and BR unrotated columns (0:
    all rotate).
    """

    ROWS: int
    BH: int
    BR: int
    INTERLEAVED: bool


def kind_of(half: int, dim: int, interleaved: bool, itemsize: int) -> Kind:
    """Return the constants for rows of ``dim`` columns, 2 * half of which rotate."""
    rest = dim - 2 * half
    pairs, others = (
        triton.next_power_of_2(max(half, 1)),
        triton.next_power_of_2(rest) if rest else 0,
    )
    numbers = INTERPRETED_NUMBERS if INTERPRETED else BYTES // itemsize
    return Kind(
        max(1, numbers // triton.next_power_of_2(2 * pairs + others)), pairs, others, interleaved
    )


def programs(device: torch.device) -> int:
    """Return the number of programs that share the rows for the weight gradient, each with partial
    sums: 16 warps per SM.

    It depends only on the kind of device, so equal devices give equal bits.
    """
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * (16 // WARPS)
