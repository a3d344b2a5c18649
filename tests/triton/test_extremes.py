# SPDX-License-Identifier: Apache-2.0
"""Rows whose scores are all finfo.min, once or twice: finite values are data.

The Triton backend is interpreted; tests/regressions has the peers' wrong results for every backend.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_mutants import mutated

from support.attention_check import check_attention

LOWEST = torch.finfo(torch.float32).min


def _problem(
    dtype: torch.dtype, *, twice: bool
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    query, key, value = (torch.randn(2, 2, n, 16).to(dtype) for n in (9, 70, 70))
    mask = torch.zeros(2, 1, 9, 70)
    mask[:, :, 3] = LOWEST
    mask[:, :, 5, :40] = LOWEST  # with other scores
    return (query, key, value), {"attn_mask": mask} | ({"bias": mask.clone()} if twice else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("twice", [False, True], ids=["one_finfo_min", "two_finfo_min"])
def test_rows_of_finfo_min_give_the_mean(twice: bool, dtype: torch.dtype) -> None:
    """The gradient is right too: two terms of finfo.min are still finite, not -inf."""
    args, keywords = _problem(dtype, twice=twice)
    check_attention(args, keywords, "triton", data="any")


@pytest.mark.parametrize(
    ("file", "old", "new", "twice"),
    [
        (
            "score_mod.py",
            "s = tl.maximum(s, -FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)",
            "s = s + 0.0",
            True,
        ),
        ("bwd.py", "> LARGE:", "> 2.0 * float('inf'):", False),
    ],
    ids=["sum_overflows", "lse_loses_the_log_of_the_sum"],
)
def test_planted_faults_fail_the_test_above(
    file: str, old: str, new: str, twice: bool, tmp_path: Path
) -> None:
    """Each fault removes a line that makes these rows right."""
    args, keywords = _problem(torch.float32, twice=twice)
    with mutated("attention", file, old, new, tmp_path), pytest.raises(AssertionError):
        check_attention(args, keywords, "triton", data="any")
