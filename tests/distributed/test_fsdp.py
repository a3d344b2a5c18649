# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two processes: every op uses gathered parameters and refuses freed ones by name."""

from __future__ import annotations

import pytest

from pytransformer.ops._core.registry import OPS
from support.ranks import Pool
from support.split_fsdp import gradients_and_refusal

# A case of each op with parameters besides the first input.
CASES = {
    "attention": "sinks",
    "attention_varlen": "varlen_sinks",
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "add_norm": "add_norm",
    "feed_forward": "feed_forward_swiglu",
    "linear_cross_entropy": "linear_cross_entropy",
    "rotary": "rotary_norm",
}


@pytest.mark.parametrize("op", CASES)
def test_fsdp_gradients_are_right_and_freed_parameters_refused(pool: Pool, op: str) -> None:
    for message in pool.run(2, gradients_and_refusal, CASES[op]):
        assert (
            message.startswith(f"{op}: ")
            and "has no storage: it was freed (FSDP2 reshard" in message
        )


def test_every_op_with_gradients_has_a_case() -> None:
    assert CASES.keys() == {name for name, op in OPS.items() if op.positions}
