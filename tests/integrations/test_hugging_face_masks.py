"""The lowered masks say exactly what transformers' own dense mask says; what is not understood stays dense or is refused."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import pytransformer as pt


@pytest.fixture
def ours(hugging_face: ModuleType) -> ModuleType:
    from pytransformer.integrations import hugging_face as module

    return module


@pytest.fixture
def masking(hugging_face: ModuleType) -> ModuleType:
    return hugging_face.masking_utils


def as_dense(
    ours: ModuleType, mask: torch.Tensor | None, causal: bool, window: int | None, shape: tuple[int, ...]
) -> torch.Tensor:
    """What :func:`attention_forward` makes of a mask, as (B, 1, Lq, Lk) bool, found by asking it: each value is a one-hot
    vector, so that the output is the row of weights."""
    batch, _, num_queries, num_keys = shape
    module = SimpleNamespace(is_causal=causal, config=SimpleNamespace(sliding_window=window))
    query, key = torch.zeros(batch, 1, num_queries, 8), torch.zeros(batch, 1, num_keys, 8)
    value = torch.eye(num_keys).expand(batch, 1, num_keys, num_keys)
    with pt.use_backend(attention="reference"):
        out, _ = ours.attention_forward(module, query, key, value, mask, sliding_window=window)
    return out.transpose(1, 2) > 0


PATTERNS = ["causal", "window", "bidirectional", "two-sided window", "chunked", "or", "and", "packed"]
LENGTHS = [  # queries, keys, first query, first key
    (5, 5, 0, 0),  # plain
    (1, 6, 5, 0),  # decoding
    (3, 8, 5, 0),  # several queries after a cache
    (3, 5, 7, 5),  # after a sliding cache that dropped keys
    (4, 9, 0, 0),  # filling an empty static cache
    (2, 9, 4, 0),  # filling a static cache
]


@pytest.mark.parametrize("padding", ["none", "left", "right", "short"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_means_what_the_dense_mask_means(
    ours: ModuleType, masking: ModuleType, pattern: str, lengths: tuple[int, int, int, int], padding: str
) -> None:
    num_queries, num_keys, first_query, first_key = lengths
    window = 3 if pattern == "window" else None
    end = first_key + num_keys
    function = {
        "causal": masking.causal_mask_function,
        "window": masking.sliding_window_causal_mask_function(3),
        "bidirectional": masking.bidirectional_mask_function,
        "two-sided window": masking.sliding_window_bidirectional_mask_function(2),
        "chunked": masking.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)),
        "or": masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: (k < 2) & (q < 4)),
        "and": masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: k != 1),
        "packed": masking.and_masks(
            masking.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 2]] * 2)),
            masking.causal_mask_function,
        ),
    }[pattern]
    real = None
    if padding != "none":
        real = torch.ones(2, end - 1 if padding == "short" else end, dtype=torch.bool)
        real[1, :2] = padding != "left"
        if padding == "right":
            real[1, -2:] = False
    both_ways = "bidirectional" in pattern or "two-sided" in pattern
    arguments: dict[str, Any] = dict(
        batch_size=2, q_length=num_queries, kv_length=num_keys, q_offset=first_query, kv_offset=first_key, mask_function=function,
        attention_mask=real, local_size={"window": 3, "two-sided window": 2, "chunked": 3}.get(pattern),
    )  # fmt: skip
    exact = masking.sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    # As the models call it: no skipping where anything was added to the plain pattern.
    plain = pattern not in ("or", "and", "packed")
    mask = ours.attention_mask(
        **arguments, allow_is_causal_skip=plain and not both_ways, allow_is_bidirectional_skip=plain and both_ways
    )
    shape = (2, 1, num_queries, num_keys)
    assert torch.equal(as_dense(ours, mask, not both_ways, window, shape), exact.expand(shape))


@pytest.mark.parametrize("pattern", ["causal", "window", "bidirectional"])
def test_nothing_quadratic_is_built(ours: ModuleType, masking: ModuleType, pattern: str) -> None:
    function = {
        "causal": masking.causal_mask_function,
        "window": masking.sliding_window_causal_mask_function(100),
        "bidirectional": masking.bidirectional_mask_function,
    }[pattern]
    real = torch.ones(2, 4096, dtype=torch.bool)
    real[0, :7] = False
    mask = ours.attention_mask(
        2, 4096, 4096, mask_function=function, attention_mask=real, allow_is_causal_skip=pattern != "bidirectional",
        allow_is_bidirectional_skip=pattern == "bidirectional",
    )  # fmt: skip
    assert mask.untyped_storage().nbytes() == 2 * 4096


def test_a_model_that_looks_into_its_mask_gets_a_dense_one(ours: ModuleType, masking: ModuleType) -> None:
    real = torch.tensor([[False, True, True, True]])
    for function in (masking.causal_mask_function, masking.bidirectional_mask_function):
        arguments: dict[str, Any] = dict(mask_function=function, attention_mask=real, allow_is_causal_skip=False)
        mask = ours.attention_mask(1, 4, 4, **arguments)
        assert torch.equal(mask, masking.sdpa_mask(1, 4, 4, **arguments))


def test_windows_are_recognised_by_what_they_are(ours: ModuleType, masking: ModuleType) -> None:
    def overlay(sliding_window: int) -> Any:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    assert ours.causal_window(masking.sliding_window_causal_mask_function(7)) == 7
    for other in (
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
        masking.sliding_window_bidirectional_mask_function(7),
        masking.sliding_window_overlay(7),
        masking.chunked_causal_mask_function(7, torch.zeros(1)),
        masking.and_masks(overlay(7), masking.causal_mask_function),
        masking.and_masks(masking.causal_mask_function, masking.sliding_window_overlay(7)),
        masking.and_masks(masking.sliding_window_overlay(7), masking.causal_mask_function, masking.causal_mask_function),
        masking.or_masks(masking.sliding_window_overlay(7), masking.causal_mask_function),
        lambda b, h, q, k: k <= q,
    ):
        assert ours.causal_window(other) is None


def test_padding_does_not_take_causality_from_the_module(ours: ModuleType, masking: ModuleType) -> None:
    """BridgeTower gives bidirectional masks to modules that call themselves causal; ALIGN's modules say nothing."""
    real = torch.tensor([[True, True, True, False]])
    mask = ours.attention_mask(
        1, 4, 4, mask_function=masking.bidirectional_mask_function, attention_mask=real, allow_is_bidirectional_skip=True
    )
    assert torch.equal(as_dense(ours, mask, True, None, (1, 1, 4, 4)), real[:, None, None].expand(1, 1, 4, 4))


# ---- what is refused


def call(ours: ModuleType, mask: torch.Tensor | None = None, window: int | None = None, **more: Any) -> Any:
    x = torch.zeros(1, 2, 4, 8)
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=window))
    with pt.use_backend(attention="reference"):
        return ours.attention_forward(module, x, x, x, mask, **more)


def test_sinks_and_paged_caches_are_refused(ours: ModuleType) -> None:
    with pytest.raises(ValueError, match="s_aux"):
        call(ours, s_aux=torch.zeros(2))
    with pytest.raises(ValueError, match="paged"):
        call(ours, cache=object())
    assert call(ours, s_aux=None, cache=None, position_ids=None)[1] is None


def test_a_window_that_model_and_module_disagree_on_is_refused(ours: ModuleType) -> None:
    mask = torch.ones(1, 1, 1, 4, dtype=ours.CAUSAL_WINDOW)
    call(ours, mask, window=2, sliding_window=2)
    call(ours, mask, window=2)
    for window, of_call in ((2, 3), (None, 2), (None, None)):
        with pytest.raises(ValueError, match="sliding-window mask"):
            call(ours, mask, window=window, sliding_window=of_call)


def test_a_changed_causal_mask_is_refused(ours: ModuleType) -> None:
    with pytest.raises(ValueError, match="changed its causal mask"):
        call(ours, torch.ones(1, 1, 4, 4, dtype=ours.CAUSAL))


def test_a_batch_of_one_broadcasts(ours: ModuleType) -> None:
    query, key = torch.randn(1, 2, 3, 8), torch.randn(4, 2, 5, 8)
    module = SimpleNamespace(is_causal=False)
    with pt.use_backend(attention="reference"):
        out, _ = ours.attention_forward(module, query, key, key, None)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2)
    torch.testing.assert_close(out, want)
    assert out.is_contiguous()
