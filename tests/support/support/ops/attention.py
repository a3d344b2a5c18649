# SPDX-License-Identifier: Apache-2.0
"""Attention: fuzzer, mutants, calibration."""

from __future__ import annotations

from .. import calibrate_attention, draw_attention, fuzz_attention
from ..checks import Checks, Fuzzer, Mutants
from ..mutants_attention import BACKWARD_FAULTS, FAULTS

CHECKS = Checks(
    fuzzer=Fuzzer(
        draw_attention.draw,
        fuzz_attention.examine,
        features=tuple(draw_attention.CHANCES),
        rare=(
            *(
                "alibi",
                "t5",
                "dense",
                "bool_mask",
                "blocks",
                "pages",
                "float_mask",
                "gqa",
                "value_dim",
                "varlen",
                "strided",
                "spoiled",
                "lowest",
            ),
        ),
    ),
    mutants=Mutants(
        ("attention",), FAULTS, BACKWARD_FAULTS, applies=lambda problem: not problem.packed
    ),
    calibration=calibrate_attention.CALIBRATION,
)
