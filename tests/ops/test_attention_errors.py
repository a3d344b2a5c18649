# SPDX-License-Identifier: Apache-2.0
"""Every bad input raises an error with the argument's name, its value and the expectation."""

from __future__ import annotations

import math

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.tensors import looks_at_values


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = {"query": x(2, 4, 5, 8), "key": x(2, 2, 7, 8), "value": x(2, 2, 7, 8)}

BAD = [
    ("rank", {"query": x(4, 5, 8)}, ValueError, "query must have 4 dimensions, got 3"),
    ("not a tensor", {"key": [1.0]}, TypeError, "key must be a Tensor, got list"),
    (
        "integers",
        {"query": x(2, 4, 5, 8, dtype=torch.int64)},
        TypeError,
        "query must be float32.*got torch.int64",
    ),
    (
        "dtypes",
        {"key": x(2, 2, 7, 8, dtype=torch.bfloat16)},
        TypeError,
        "key is torch.bfloat16 but query is torch.float32",
    ),
    ("batch", {"key": x(3, 2, 7, 8), "value": x(3, 2, 7, 8)}, ValueError, "same batch size"),
    (
        "heads",
        {"key": x(2, 3, 7, 8), "value": x(2, 3, 7, 8)},
        ValueError,
        "multiple of key's heads",
    ),
    (
        "key and value heads",
        {"value": x(2, 4, 7, 8)},
        ValueError,
        "key and value must have the same heads",
    ),
    (
        "key and value length",
        {"value": x(2, 2, 6, 8)},
        ValueError,
        "key and value must have the same",
    ),
    ("head size", {"key": x(2, 2, 7, 16)}, ValueError, "same head size"),
    (
        "mask shape",
        {"attn_mask": x(2, 3, 5, 7)},
        ValueError,
        "attn_mask of shape .* does not broadcast",
    ),
    (
        "mask integers",
        {"attn_mask": x(5, 7, dtype=torch.int32)},
        TypeError,
        "attn_mask must be bool or floating, got torch.int32",
    ),
    (
        "mask device",
        {"attn_mask": torch.zeros(5, 7, device="meta")},
        ValueError,
        "attn_mask is on meta but query is on cpu",
    ),
    ("key device", {"key": torch.zeros(2, 2, 7, 8, device="meta")}, ValueError, "key is on meta"),
    ("bias bool", {"bias": x(5, 7, dtype=torch.bool)}, TypeError, "bias must be floating"),
    (
        "bias type",
        {"bias": 3.0},
        TypeError,
        "bias must be a Tensor, AlibiBias or RelativePositionBias, got float",
    ),
    ("slopes", {"bias": pt.AlibiBias(x(3))}, ValueError, "one slope per query head, 4, got 3"),
    ("sinks", {"sinks": x(3)}, ValueError, "sinks must have one logit per query head, 4, got 3"),
    ("sinks of pairs", {"sinks": x(2, 4)}, ValueError, "sinks must have 1 dimensions, got 2"),
    (
        "sinks integers",
        {"sinks": x(4, dtype=torch.int64)},
        TypeError,
        "sinks must be float32.*got torch.int64",
    ),
    ("sinks number", {"sinks": 0.0}, TypeError, "sinks must be a Tensor, got float"),
    (
        "table",
        {"bias": pt.RelativePositionBias(x(32, 3))},
        ValueError,
        r"bias.table must be \(buckets, Hq\)",
    ),
    ("odd table", {"bias": pt.RelativePositionBias(x(31, 4))}, ValueError, "even number"),
    (
        "distance",
        {"bias": pt.RelativePositionBias(x(32, 4), True, 8)},
        ValueError,
        "max_distance must be an int greater than 8",
    ),
    (
        "causal",
        {"causal": True},
        ValueError,
        "causal must be one of None, 'top_left', 'bottom_right', got True",
    ),
    ("causal name", {"causal": "left"}, ValueError, "causal must be one of"),
    ("window", {"window": 5}, ValueError, r"window must be \(left, right\)"),
    ("negative window", {"window": (-1, 3)}, ValueError, r"window must be \(left, right\)"),
    (
        "prefix alone",
        {"prefix_lengths": torch.tensor([1, 1])},
        ValueError,
        "prefix_lengths needs causal",
    ),
    (
        "one segment",
        {"query_segments": torch.zeros(2, 5, dtype=torch.int64)},
        ValueError,
        "go together",
    ),
    (
        "lengths shape",
        {"key_lengths": torch.tensor([1])},
        ValueError,
        r"key_lengths must have shape \(2,\)",
    ),
    (
        "lengths dtype",
        {"key_lengths": torch.tensor([1.0, 2.0])},
        TypeError,
        "key_lengths must have an integer dtype",
    ),
    (
        "lengths range",
        {"key_lengths": torch.tensor([1, 8])},
        ValueError,
        "key_lengths must be between 0 and 7, got 8",
    ),
    (
        "negative length",
        {"query_lengths": torch.tensor([-1, 2])},
        ValueError,
        "query_lengths must be between 0 and 5, got -1",
    ),
    ("scale", {"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    ("scale type", {"scale": "1"}, TypeError, "scale must be a number"),
    ("softcap", {"softcap": 0.0}, ValueError, "softcap must be greater than 0"),
    ("dropout", {"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ("negative dropout", {"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1"),
    ("seed", {"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, "dropout_seed must be an int"),
    (
        "large seed",
        {"dropout_p": 0.1, "dropout_seed": 2**63},
        ValueError,
        "dropout_seed must fit in 64 bits",
    ),
    ("backend", {"backend": "fast"}, ValueError, "unknown backend 'fast'"),
]


VALUES = [
    b for b in BAD if b[0] in ("lengths range", "negative length")
]  # checked by the op itself, not by its wrapper
SHAPES = [b for b in BAD if b[0] not in ("lengths range", "negative length")]


@pytest.mark.parametrize("name, change, error, message", SHAPES, ids=[b[0] for b in SHAPES])
def test_bad_input_is_named(name: str, change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pt.attention(**(GOOD | change))


@pytest.mark.parametrize("name, change, error, message", VALUES, ids=[b[0] for b in VALUES])
def test_values_are_checked_by_every_backend(
    name: str, change: dict, error: type[Exception], message: str, backend: str
) -> None:
    with pytest.raises(error, match=message):
        pt.attention(**(GOOD | change), backend=backend)


def test_values_on_a_gpu_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU calls are in tests/cuda/test_gpu_attention.py."""
    monkeypatch.delenv("PYTRANSFORMER_CHECK", raising=False)
    assert looks_at_values(torch.device("cpu")) and not looks_at_values(torch.device("cuda"))
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("PYTRANSFORMER_CHECK", value)
        assert looks_at_values(torch.device("cuda")) is expected and looks_at_values(
            torch.device("cpu")
        )


def test_unable_forced_backend_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forced backend has no fallback; the message and explain give the same reason."""
    from pytransformer.ops._core.registry import OPS, Backend

    op = OPS["attention"]
    reference = op.backends["reference"]
    picky = Backend("picky", reference.forward, reference.backward, lambda a: "only on Sundays")
    monkeypatch.setattr(op, "backends", {**op.backends, "picky": picky})
    for call in (lambda: pt.attention(**GOOD, backend="picky"), lambda: _forced("picky")):
        with pytest.raises(
            pt.BackendError, match="'picky' was forced but cannot do this: only on Sundays"
        ):
            call()
    assert pt.explain("attention", **GOOD).reasons["picky"] == "only on Sundays"


def _forced(backend: str) -> torch.Tensor:
    with pt.use_backend(attention=backend):
        return pt.attention(**GOOD)


def test_strict_raises_instead_of_the_reference_and_lists_every_reason() -> None:
    from pytransformer.ops._core.registry import OPS, Backend

    op = OPS["attention"]
    saved = op.backends
    reference = saved["reference"]
    picky = Backend("picky", reference.forward, reference.backward, lambda a: "only on Sundays")
    op.backends = {"picky": picky, "reference": reference}
    try:
        with pytest.raises(pt.BackendError, match=r"strict mode.*picky: only on Sundays"):
            pt.attention(**GOOD, strict=True)
        with pytest.warns(RuntimeWarning, match="runs on the reference: picky: only on Sundays"):
            pt.attention(**GOOD)
        assert [f.reason for f in pt.fallbacks()] == ["picky: only on Sundays"]
    finally:
        op.backends = saved
        pt.clear_fallbacks()


def test_unknown_names_raise() -> None:
    with pytest.raises(ValueError, match="unknown op 'attend'"):
        pt.explain("attend", **GOOD)
    with (
        pytest.raises(ValueError, match="unknown backend 'fast'"),
        pt.use_backend(attention="fast"),
    ):
        pass
