# SPDX-License-Identifier: Apache-2.0
"""How many rows a program of rotary holds at once, chosen by registers (tests/triton/resources.json), not by time on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .._lang import INTERPRETED

MOST_COLUMNS = 4096  # of a row, which a program holds whole
MOST_ROWS = 2**31 - 2**14  # of all heads, and positions of a cache: counted in 32 bits
BYTES = 4096  # of a tile: 16 numbers of 16 bits in a thread, and as many of each table; twice that of float32 spills on sm_100 and sm_120
INTERPRETED_NUMBERS = 8192  # the interpreter's time goes by operations, not by elements
WARPS = 4
MOST_REGISTERS = 128  # of a thread, in backward


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for: ROWS rows, each of up to BH pairs and BR columns that do not turn (0: all turn)."""

    ROWS: int
    BH: int
    BR: int
    INTERLEAVED: bool


def kind_of(half: int, dim: int, interleaved: bool, itemsize: int) -> Kind:
    """Of rows of ``dim`` columns, 2 * half of which turn."""
    rest = dim - 2 * half
    pairs, others = triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(rest) if rest else 0
    numbers = INTERPRETED_NUMBERS if INTERPRETED else BYTES // itemsize
    return Kind(max(1, numbers // triton.next_power_of_2(2 * pairs + others)), pairs, others, interleaved)


def programs(device: torch.device) -> int:
    """How many share the rows where the weight's gradient is summed, each with a part of it: 16 warps on each multiprocessor. It depends
    on the kind of device alone, so results are equal bits on equal devices."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * (16 // WARPS)
