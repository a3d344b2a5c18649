"""Attention of the Triton tier, interpreted: the shared cases and random problems within the bound."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from pytransformer.testing.cases import Case, cases

CASES = [c for op in ("attention", "attention_varlen") for c in cases(op, "small")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_forward(case: Case) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[CASES.index(case) % 3]
    args, kwargs = case.make("cpu", dtype, seed=0)
    op = getattr(pt, case.op)
    out, lse = op(*args, **kwargs, return_lse=True, backend="triton", strict=True)
    want, want_lse = op(*(t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args), **kwargs, return_lse=True, backend="reference")
    assert bounds.relative_error(out, want) < 2 * torch.finfo(dtype).eps
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert bounds.relative_error(lse.nan_to_num(neginf=0.0), want_lse.nan_to_num(neginf=0.0)) < 1e-6
