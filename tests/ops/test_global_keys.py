# SPDX-License-Identifier: Apache-2.0
"""``global_keys``: a window and the first keys, in cases that random problems cannot name."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds
from support.attention_check import check_attention, check_packed

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(
    lq: int, lk: int, heads: int = 4, kv: int = 2, dim: int = 16, batch: int = 2
) -> tuple[torch.Tensor, ...]:
    return (
        draw(batch, heads, lq, dim),
        draw(batch, kv, lk, dim, seed=1),
        draw(batch, kv, lk, dim, seed=2),
    )


def seen(lq: int, lk: int, left: int, right: int, first: int, offset: int = 0) -> torch.Tensor:
    """Return the visible mask, pair by pair."""
    distance = torch.arange(lk) - torch.arange(lq)[:, None] - offset
    return ((distance >= -left) & (distance <= right)) | (torch.arange(lk) < first)


# Kernels have tiles of 64 keys and blocks of 96 to 192: gaps of several tiles, of a part of one,
# and none.
@pytest.mark.parametrize("first", [1, 4, 65, 200, 1000])
@pytest.mark.parametrize("window", [(5, 3), (64, None), (None, 2), (130, 0)])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_values_and_gradients_within_the_bound(
    backend: str, causal: str | None, window: tuple[int | None, int | None], first: int
) -> None:
    """Keys that no query sees hold NaN; with one query this includes the gap before the window."""
    for lq, lk in ((300, 300), (1, 700), (70, 500)):
        options: dict[str, Any] = {"causal": causal, "window": window, "global_keys": first}
        options["key_lengths"] = torch.tensor([lk, lk // 2])
        check_attention(qkv(lq, lk), options, backend, poisoned=True)


def test_global_keys_equal_a_dense_union_mask(backend: str) -> None:
    """ALiBi's distances, dropout and sinks count from the query as before."""
    args = qkv(300, 300)
    more: dict[str, Any] = {
        "bias": pt.AlibiBias(torch.tensor([0.5, 0.1, 0.02, 0.0])),
        "sinks": torch.tensor([0.0, 1.0, 2.0, -1.0]),
    }
    more |= {"dropout_p": 0.2, "dropout_seed": 5}
    window = {"window": (20, 7), "global_keys": 3}
    found = check_attention(args, {**window, **more}, backend)
    output = check_attention(args, {"attn_mask": seen(300, 300, 20, 7, 3), **more}, "reference")
    for name, want in output.items():
        assert bounds.agree(found[name], want), name


@pytest.mark.parametrize("kind", ["bool", "blocks", "floating"])
def test_masks_hide_global_keys(backend: str, kind: str) -> None:
    mask = torch.rand(2, 1, 200, 300, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[:, :, 50:120, :130] = False
    given: Any = mask
    if kind == "blocks":
        given = pt.BlockMask.from_dense(mask)
    if kind == "floating":
        given = torch.where(mask, draw(2, 1, 200, 300, seed=4), -torch.inf)
    options: dict[str, Any] = {"window": (40, 10), "global_keys": 70, "causal": "bottom_right"}
    if kind != "blocks":
        check_attention(qkv(200, 300), {**options, "attn_mask": given}, backend, poisoned=True)
        return
    out = pt.attention(*qkv(200, 300), **options, attn_mask=given, backend=backend, strict=True)
    want = pt.attention(*qkv(200, 300), **options, attn_mask=mask, backend="reference")
    assert bounds.agree(out, want)


def test_segments_hide_global_keys(backend: str) -> None:
    """Sorted segments are an interval; the other case is unsorted."""
    for ids in (torch.arange(300).div(90, rounding_mode="floor"), torch.arange(300) * 7 % 3):
        segments = ids.expand(2, 300).contiguous()
        options: dict[str, Any] = {
            "window": (15, 0),
            "global_keys": 100,
            "query_segments": segments,
            "key_segments": segments,
        }
        check_attention(qkv(300, 300), options, backend, poisoned=True)


def test_queries_past_key_lengths_see_only_global_keys(backend: str) -> None:
    """The alignment is top left and the window lies past the last key."""
    options: dict[str, Any] = {
        "window": (5, 3),
        "global_keys": 2,
        "key_lengths": torch.tensor([150, 1]),
    }
    check_attention(qkv(300, 300), options, backend, poisoned=True)
    # Hide one pair, because a mask that hides nothing is dropped.
    mask = torch.ones(2, 1, 300, 300, dtype=torch.bool)
    mask[:, :, 7, 5] = False
    check_attention(qkv(300, 300), {**options, "attn_mask": mask}, backend, poisoned=True)


def test_packed_equals_padded(backend: str) -> None:
    offsets = torch.tensor([0, 5, 5, 133]), torch.tensor([0, 9, 20, 160])
    args = draw(133, 4, 16), draw(160, 2, 16, seed=1), draw(160, 2, 16, seed=2), *offsets, 128, 140
    check_packed(args, {"window": (9, 0), "global_keys": 4, "causal": "bottom_right"}, backend)


def test_decoding_equals_the_full_sequence(backend: str) -> None:
    """The cache stores the first keys and a window."""
    query, key, value = qkv(90, 90)
    options: dict[str, Any] = {
        "causal": "bottom_right",
        "window": (16, 0),
        "global_keys": 4,
        "backend": backend,
        "strict": True,
    }
    whole = pt.attention(query, key, value, **options)
    for i in (0, 3, 4, 20, 21, 89):
        step = pt.attention(
            query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1], **options
        )
        assert bounds.agree(step, whole[:, :, i : i + 1]), i


def test_global_keys_without_a_window_raise() -> None:
    args = qkv(40, 40)
    for window in (None, (None, None)):
        with pytest.raises(ValueError, match="global_keys must be left out without a window"):
            pt.attention(*args, causal="top_left", window=window, global_keys=7)


def test_attention_weights_equal_the_dense_mask() -> None:
    query, key, value = qkv(50, 50)
    options: dict[str, Any] = {"window": (3, 0), "global_keys": 2, "causal": "top_left"}
    out, lse = pt.attention(query, key, value, **options, return_lse=True)
    weights = pt.attention_weights(query, key, lse, **options)
    assert torch.equal(
        weights[0, 0] > 0, seen(50, 50, 3, 0, 2) & torch.ones(50, 50, dtype=torch.bool).tril()
    )
    assert bounds.agree(weights @ value.repeat_interleave(2, 1), out)
    assert bool((pt.attention_summary(query, key, lse, **options)["entropy"][:, :, 6:] > 0).all())


@pytest.mark.skipif(
    pt.ops._core.native.why_not("attention_fwd") is not None, reason="needs the native CPU library"
)
def test_hidden_gap_costs_no_time() -> None:
    """Each query sees 132 of 8,192 keys, a twentieth of the causal tiles.

    Forward and backward take less than a fifth of the causal time.
    """
    args = [t.requires_grad_() for t in qkv(8192, 8192, heads=1, kv=1, dim=32, batch=1)]

    def seconds(**options: Any) -> float:
        taken = []
        for _ in range(3):
            start = time.thread_time()
            pt.attention(
                *args, causal="top_left", **options, backend="cpu", strict=True
            ).sum().backward()
            taken.append(time.thread_time() - start)
        return min(taken)

    assert seconds(window=(127, 0), global_keys=4) < seconds() / 5


@pytest.mark.parametrize("given", [-1, 1.5, True, "4", None])
def test_bad_values_are_named_in_the_error(given: Any) -> None:
    with pytest.raises(ValueError, match="global_keys must be an int >= 0, got"):
        pt.attention(*qkv(5, 5), window=(2, 0), global_keys=given)


def test_chunks_use_absolute_indices(backend: str) -> None:
    """In keys 45 to 115, those before 60 are global.

    The queries are 90 to 135, the window 20.
    """
    tensors = [t.requires_grad_() for t in qkv(45, 70)]
    results = {}
    for name in ("reference", backend):
        a = attention_op.prepare(*tensors, window=(20, 5), global_keys=60, causal="top_left")[0]
        a = a._replace(query_start=90, key_start=45)
        out, lse = attention_op(a, name, True)
        results[name] = [out, lse, *torch.autograd.grad([out.square().sum(), lse.sum()], tensors)]
    assert all(map(bounds.agree, results[backend], results["reference"]))
