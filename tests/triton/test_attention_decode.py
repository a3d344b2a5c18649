# SPDX-License-Identifier: Apache-2.0
"""Decode, few queries over many keys: split KV, one tile per group of heads, interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import every_third
from kernel_mutants import mutated

import pytransformer as pt
from pytransformer.kernels import _lang
from pytransformer.kernels.attention.configs import SPLIT, SPLIT_INTERPRETED, plan_of
from pytransformer.testing import bounds
from support.attention_check import check_attention

NUM_KEYS = 3 * SPLIT_INTERPRETED.min_keys + 41
LIMITS = {"max_rows": 32, "tile": 64, "min_keys": 512, "max_splits": 64}


def _inputs(
    heads: tuple[int, int] = (4, 2), num_queries: int = 1, batch: int = 2
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(batch, h, n, d)
        for h, n, d in (
            (heads[0], num_queries, 24),
            (heads[1], NUM_KEYS, 24),
            (heads[1], NUM_KEYS, 40),
        )
    ]


def _triton(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return pt.attention(*args, **kwargs, return_lse=True, backend="triton", strict=True)


def _launches(*args: Any, **kwargs: Any) -> list[str]:
    """Return the kernels of a call without running it."""
    found: list[str] = []
    with _lang.observed(lambda kernel, arguments, options: found.append(kernel.__name__)):
        _triton(*args, **kwargs)
    return found


@pytest.mark.parametrize(
    "kwargs",
    [
        {"causal": "bottom_right"},
        {
            "causal": "bottom_right",
            "key_lengths": torch.tensor([NUM_KEYS, 70]),
            "dropout_p": 0.3,
            "dropout_seed": 4,
        },
        {
            "causal": "bottom_right",
            "window": (150, 0),
            "softcap": 3.0,
            "bias": pt.AlibiBias(torch.rand(4)),
        },
        {"causal": "bottom_right", "bias": pt.RelativePositionBias(torch.randn(32, 4), False, 128)},
        {"causal": "bottom_right", "prefix_lengths": torch.tensor([300, 0]), "window": (60, 90)},
        {
            "attn_mask": torch.arange(NUM_KEYS)
            >= torch.tensor([290, NUM_KEYS])[:, None, None, None]
        },  # padding on the left
        {
            "attn_mask": torch.arange(NUM_KEYS) % 7 > torch.arange(4)[:, None, None],
            "bias": torch.randn(2, 4, 1, NUM_KEYS),
        },
        {
            "query_segments": torch.tensor([[1], [2]]),
            "key_segments": torch.arange(2 * NUM_KEYS).view(2, -1) % 3,
        },
    ],
    ids=["causal", "dropout", "alibi", "t5", "prefix", "left_padding", "dense", "segments"],
)
@pytest.mark.parametrize("num_queries", [1, 5])
def test_decode_within_the_bound(num_queries: int, kwargs: dict[str, Any]) -> None:
    query, key, value = _inputs(num_queries=num_queries)
    if "query_segments" in kwargs:
        kwargs = kwargs | {
            "query_segments": kwargs["query_segments"].expand(2, num_queries).contiguous()
        }
    check_attention((query, key, value), kwargs, "triton")


def test_short_and_long_sequences_share_a_batch() -> None:
    """Decode and prefill each process their sequences; rows beyond the lengths stay zero."""
    query, key, value = _inputs(heads=(2, 1), num_queries=30, batch=4)
    lengths = {
        "query_lengths": torch.tensor([30, 1, 0, 11]),
        "key_lengths": torch.tensor([NUM_KEYS, NUM_KEYS, 5, 140]),
    }
    out, lse = _triton(query, key, value, **lengths, causal="bottom_right")
    want, want_lse = pt.attention(
        query, key, value, **lengths, causal="bottom_right", return_lse=True, backend="reference"
    )
    assert bounds.agree(out, want) and torch.equal(lse.isinf(), want_lse.isinf())


def test_sequence_gives_the_same_bits_alone_padded_and_packed() -> None:
    query, key, value = _inputs(heads=(2, 1), num_queries=20, batch=3)
    queries, keys = [20, 2, 1], [NUM_KEYS, 300, 90]
    kwargs = {"causal": "bottom_right", "dropout_p": 0.2, "dropout_seed": 9}
    padded, _ = _triton(
        query,
        key,
        value,
        query_lengths=torch.tensor(queries),
        key_lengths=torch.tensor(keys),
        **kwargs,
    )
    rows = [
        torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])
        for t, lengths in ((query, queries), (key, keys), (value, keys))
    ]
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    packed = pt.attention_varlen(
        *rows, *starts, max(queries), max(keys), **kwargs, backend="triton", strict=True
    )
    alone, _ = _triton(query[:1], key[:1], value[:1], **kwargs)
    assert torch.equal(alone, padded[:1])
    for b, n in enumerate(queries):
        assert torch.equal(packed[int(starts[0][b]) :][:n], padded[b, :, :n].transpose(0, 1)), b
    kwargs = {"causal": "bottom_right"}  # dropout depends on a sequence's index
    together, _ = _triton(
        query,
        key,
        value,
        query_lengths=torch.tensor(queries),
        key_lengths=torch.tensor(keys),
        **kwargs,
    )
    for b, (n, m) in enumerate(zip(queries, keys)):
        alone, _ = _triton(
            query[b : b + 1, :, :n], key[b : b + 1, :, :m], value[b : b + 1, :, :m], **kwargs
        )
        assert torch.equal(alone, together[b : b + 1, :, :n]), b


def test_gradients_within_the_bound() -> None:
    """Backward uses the lse of the combined splits."""
    leaves = [t.requires_grad_() for t in _inputs(num_queries=2)]
    results = []
    for backend in ("triton", "reference"):
        out = pt.attention(
            *leaves, causal="bottom_right", dropout_p=0.1, dropout_seed=3, backend=backend
        )
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for ours, want in zip(*results):
        assert bounds.agree(ours, want)


def test_plan_depends_on_sizes() -> None:
    """The plan lists the launches and the number of splits."""
    prefill, split_kv = plan_of(1, 8192, 4, None, False, **LIMITS)
    assert not prefill and (split_kv.rows, split_kv.splits, split_kv.min_tiles) == (4, 17, 8)
    assert plan_of(1, 1 << 20, 4, None, False, **LIMITS)[1].splits == 64
    assert plan_of(1, 400, 1, None, False, **LIMITS)[1].splits == 1
    assert plan_of(1, 1 << 20, 1, 1000, False, **LIMITS)[1].splits == 3  # of the window alone
    assert plan_of(9, 8192, 4, None, False, **LIMITS) == (True, None)
    prefill, split_kv = plan_of(9, 8192, 4, None, True, **LIMITS)
    assert prefill and split_kv.rows == 32
    assert plan_of(1, 8192, 64, None, True, **LIMITS) == (
        True,
        None,
    )  # one query exceeds the limit of decode
    assert SPLIT.max_splits & (SPLIT.max_splits - 1) == 0


def test_launches_match_the_plan() -> None:
    assert _launches(*_inputs()) == ["attention_forward", "attention_combine"]
    assert _launches(*(t[:, :, :60] for t in _inputs())) == ["attention_forward"]
    assert _launches(*_inputs((4, 1), num_queries=20)) == ["attention_forward"]
    ragged = _launches(*_inputs((4, 1), num_queries=20), query_lengths=torch.tensor([20, 1]))
    assert ragged == ["attention_forward", "attention_forward", "attention_combine"]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # from numpy, which interprets
@pytest.mark.parametrize("num_queries", [2, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("hidden_by", ["mask", "float_mask", "bias", "segments"])
def test_hidden_nan_keys_do_not_affect_results(hidden_by: str, num_queries: int) -> None:
    """A visible NaN key passes its NaN on."""
    query, key, value = (
        t.requires_grad_() for t in _inputs(heads=(2, 1), num_queries=num_queries, batch=1)
    )
    hidden = torch.zeros(NUM_KEYS, dtype=torch.bool)
    hidden[[3, 70, 300, NUM_KEYS - 1]] = True
    mask = (torch.rand(1, 2, num_queries, NUM_KEYS) > 0.3) & ~hidden
    mask[..., 5] = True
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    kwargs = {
        "mask": {"attn_mask": mask},
        "float_mask": {"attn_mask": additive},
        "bias": {"bias": additive},
        "segments": {
            "query_segments": torch.zeros(1, num_queries, dtype=torch.long),
            "key_segments": hidden.long()[None],
        },
    }[hidden_by] | {"softcap": 5.0}
    with torch.no_grad():
        want = pt.attention(query, key, value, **kwargs, backend="triton", strict=True)
        key[:, :, hidden], value[:, :, hidden] = float("nan"), float("inf")
    out, lse = _triton(query, key, value, **kwargs)
    assert torch.equal(out, want)
    for grad in torch.autograd.grad((out.sum() + lse.sum()), (query, key, value)):
        assert grad.isfinite().all()
    with torch.no_grad():
        value[:, :, 5] = float("nan")
    assert not _triton(query, key, value, **kwargs)[0].isfinite().any()


MUTANTS = {
    "splits_not_weighed": ("fwd.py", "other=0.0) * b_p, 0)", "other=0.0), 0)"),
    "splits_overlap": ("fwd.py", "run.first + i_split * tiles,", "run.first + i_split,"),
    "one_head_for_all": ("tiles.py", "i_h = i_head + i % p.group", "i_h = i_head + 0 * i"),
    "splits_beyond_the_last_read": (
        "fwd.py",
        "m_s = s < p.split_kv.splits",
        "m_s = s < p.split_kv.splits + 1",
    ),
}


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_mutants_are_detected(name: str, tmp_path: Path) -> None:
    query, key, value = (t[:, :, :300] for t in _inputs())  # fewer splits than the max
    want = pt.attention(query, key, value, backend="reference")
    with mutated("attention", *MUTANTS[name], tmp_path):
        out, _ = _triton(query, key, value)
    assert not bounds.agree(out, want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_hidden_key_test_detects_a_fault(tmp_path: Path) -> None:
    fault = (
        "mask.py",
        "m_j = tl.max(m_s.to(tl.int32), 0) != 0",
        "m_j = tl.max(m_s.to(tl.int32), 0) >= 0",
    )
    with mutated("attention", *fault, tmp_path), pytest.raises(AssertionError):
        test_hidden_nan_keys_do_not_affect_results("mask", 2)
