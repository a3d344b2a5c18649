# SPDX-License-Identifier: Apache-2.0
"""Raw ops with inconsistent arguments raise or return; they never crash, hang or read outside."""

from __future__ import annotations

import pytest
import torch

from pytransformer.ops._core import native
from pytransformer.ops._core.registry import OPS
from support.raw_calls import NATIVE, corpus
from support.raw_mutants import run_mutants

pytestmark = pytest.mark.skipif(
    native.why_not("attention_fwd") is not None,
    reason=f"no native library: {native.why_not('attention_fwd')}",
)


def test_corpus_has_every_raw_op() -> None:
    found = {f"{call.namespace}::{call.op}" for call in corpus()}
    python = {
        f"pytransformer::{op.name}_{way}"
        for op in OPS.values()
        for way in ("fwd", "bwd")
        if op.positions or way == "fwd"
    }
    names = [
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NATIVE}::")
    ]
    cpu = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")}
    assert found == python | {name for name in cpu if "emulated_" not in name}


def test_mutated_calls_raise_or_return(request: pytest.FixtureRequest) -> None:
    assert run_mutants(request.config.getoption("--raw-cases")) == []
