# SPDX-License-Identifier: Apache-2.0
"""Lowered masks equal transformers' dense masks; other masks stay dense or are refused."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections import defaultdict
from pathlib import Path
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
    ours: ModuleType, mask: Any, shape: tuple[int, ...], is_causal: bool = True
) -> torch.Tensor:
    """Return the mask that :func:`attention_forward` applies, as (B, 1, Lq, Lk) bool.

    Each value is a one-hot vector, so the output is the row of weights.
    """
    batch, _, num_queries, num_keys = shape
    module = SimpleNamespace(is_causal=is_causal)
    query, key = torch.zeros(batch, 1, num_queries, 8), torch.zeros(batch, 1, num_keys, 8)
    value = torch.eye(num_keys).expand(batch, 1, num_keys, num_keys)
    with pt.use_backend(attention="reference"):
        out, _ = ours.attention_forward(module, query, key, value, mask)
    return out.transpose(1, 2) > 0


PATTERNS = [
    "causal",
    "window",
    "bidirectional",
    "two-sided window",
    "chunked",
    "or",
    "and",
    "packed",
]
LENGTHS = [  # queries, keys, first query, first key
    (5, 5, 0, 0),  # no cache
    (1, 6, 5, 0),  # decoding
    (3, 8, 5, 0),  # several queries after a cache
    (3, 5, 7, 5),  # after a sliding cache that dropped keys
    (4, 9, 0, 0),  # filling an empty static cache
    (2, 9, 4, 0),  # filling a static cache
]


@pytest.mark.parametrize("padding", ["none", "left", "right", "short"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_lowered_masks_equal_the_dense_masks(
    ours: ModuleType,
    masking: ModuleType,
    pattern: str,
    lengths: tuple[int, int, int, int],
    padding: str,
) -> None:
    num_queries, num_keys, first_query, first_key = lengths
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
            masking.packed_sequence_mask_function(
                torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 2]] * 2)
            ),
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
        batch_size=2, q_length=num_queries, kv_length=num_keys, q_offset=first_query,
        kv_offset=first_key, mask_function=function,
        attention_mask=real, local_size={"window": 3, "two-sided window": 2,
            "chunked": 3}.get(pattern),
    )  # fmt: skip
    exact = masking.sdpa_mask(
        **arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )
    # Models call it this way: no skipping if anything was added to the plain pattern.
    plain = pattern not in ("or", "and", "packed")
    mask = ours.attention_mask(
        **arguments,
        allow_is_causal_skip=plain and not both_ways,
        allow_is_bidirectional_skip=plain and both_ways,
    )
    shape = (2, 1, num_queries, num_keys)
    for is_causal in (True, False):  # the module's is_causal is ignored
        assert torch.equal(as_dense(ours, mask, shape, is_causal), exact.expand(shape))
    if mask is None:
        assert exact.all()
    else:
        assert torch.equal(mask.as_dense(), exact.expand(shape))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("pattern", ["causal", "window"])
@pytest.mark.parametrize(
    "lengths", [(3, 4096, 0), (1, 4096, 900), (5, 4096, 4091), (2, 4096, 4090)]
)
def test_static_caches_become_key_lengths(
    ours: ModuleType,
    masking: ModuleType,
    lengths: tuple[int, int, int],
    pattern: str,
    padding: str | None,
    as_tensor: bool,
) -> None:
    """There is no (Lq, Lk) mask but a diagonal that ends at the last key.

    Later updates of the cache do not change an existing mask.
    """
    num_queries, num_keys, before = lengths
    function = (
        masking.causal_mask_function
        if pattern == "causal"
        else masking.sliding_window_causal_mask_function(100)
    )
    real = torch.ones(2, before + num_queries, dtype=torch.bool)
    real[0, :2] = padding is None
    offset = torch.tensor(before) if as_tensor else before
    arguments: dict[str, Any] = dict(
        batch_size=2,
        q_length=num_queries,
        kv_length=num_keys,
        q_offset=offset,
        mask_function=function,
        attention_mask=real,
    )
    exact = masking.sdpa_mask(
        **{**arguments, "q_offset": before}, allow_is_causal_skip=False
    ).expand(2, 1, num_queries, num_keys)
    mask = ours.attention_mask(**arguments)
    if as_tensor:
        offset.add_(num_queries)
    assert mask.dense is None
    assert (mask.padding is None) == (padding is None)
    assert (mask.lengths is None) == (before + num_queries == num_keys)
    assert torch.equal(as_dense(ours, mask, exact.shape), exact)
    assert torch.equal(mask.as_dense(), exact)
    assert torch.equal(mask.touched() == 0, exact)


def test_queries_past_the_keys_are_dense(ours: ModuleType, masking: ModuleType) -> None:
    arguments: dict[str, Any] = dict(
        batch_size=1,
        q_length=3,
        kv_length=4,
        q_offset=2,
        mask_function=masking.causal_mask_function,
    )
    assert torch.equal(
        as_dense(ours, ours.attention_mask(**arguments), (1, 1, 3, 4)),
        masking.sdpa_mask(**arguments),
    )


@pytest.mark.parametrize("pattern", ["causal", "window", "bidirectional"])
def test_no_quadratic_mask_is_built(ours: ModuleType, masking: ModuleType, pattern: str) -> None:
    function = {
        "causal": masking.causal_mask_function,
        "window": masking.sliding_window_causal_mask_function(100),
        "bidirectional": masking.bidirectional_mask_function,
    }[pattern]
    real = torch.ones(2, 4096, dtype=torch.bool)
    real[0, :7] = False
    mask = ours.attention_mask(
        2, 4096, 4096, mask_function=function, attention_mask=real,
        allow_is_causal_skip=pattern != "bidirectional",
        allow_is_bidirectional_skip=pattern == "bidirectional",
    )  # fmt: skip
    assert mask.dense is None
    assert mask.padding.untyped_storage().nbytes() == 2 * 4096
    plain = ours.attention_mask(
        2, 4096, 4096, mask_function=function, allow_is_bidirectional_skip=False
    )
    assert (plain.dense, plain.padding) == (None, None)


def test_windows_are_recognized_by_their_pattern(ours: ModuleType, masking: ModuleType) -> None:
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
        masking.and_masks(
            masking.sliding_window_overlay(7),
            masking.causal_mask_function,
            masking.causal_mask_function,
        ),
        masking.or_masks(masking.sliding_window_overlay(7), masking.causal_mask_function),
        lambda b, h, q, k: k <= q,
    ):
        assert ours.causal_window(other) is None


def test_padding_masks_ignore_the_causality_of_the_module(
    ours: ModuleType, masking: ModuleType
) -> None:
    """BridgeTower passes bidirectional masks to causal modules.

    ALIGN's modules have no is_causal.
    """
    real = torch.tensor([[True, True, True, False]])
    mask = ours.attention_mask(
        1,
        4,
        4,
        mask_function=masking.bidirectional_mask_function,
        attention_mask=real,
        allow_is_bidirectional_skip=True,
    )
    assert torch.equal(as_dense(ours, mask, (1, 1, 4, 4)), real[:, None, None].expand(1, 1, 4, 4))


def test_missing_masks_hide_nothing(ours: ModuleType) -> None:
    """Splinter's modules have no is_causal, which sdpa reads as True; eager code hides nothing."""
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for is_causal in (True, False):
        assert torch.equal(as_dense(ours, None, (1, 1, 4, 4), is_causal), everything)
    with pytest.raises(ValueError, match="is_causal=True without a mask"):
        call(ours, is_causal=True)
    call(ours, is_causal=False)


# ---- other keywords of attention


def call(ours: ModuleType, mask: Any = None, **more: Any) -> Any:
    x = torch.linspace(-1, 1, 64).view(1, 2, 4, 8)
    with pt.use_backend(attention="reference"):
        return ours.attention_forward(SimpleNamespace(), x, x, x, mask, **more)


def test_unknown_keywords_are_refused(ours: ModuleType) -> None:
    with pytest.raises(ValueError, match="'cache': a paged cache"):
        call(ours, cache=object())
    with pytest.raises(
        ValueError, match="SimpleNamespace hands its attention the keyword 'kept_keys'"
    ):
        call(ours, kept_keys=torch.zeros(1))
    assert (
        call(ours, s_aux=None, cache=None, kept_keys=None, position_ids=torch.arange(4))[1] is None
    )


def read_by_eager_code(folder: Path) -> dict[str, set[str]]:
    """Return the keywords that transformers' eager attention functions read, by name and folder."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("models/*/modeling_*.py"):
        for text in re.findall(
            r"^def \w*attention_forward\w*\(.*?(?=^\S(?<!\)))",
            path.read_text(),
            re.DOTALL | re.MULTILINE,
        ):
            (function,) = ast.parse(text).body
            assert isinstance(function, ast.FunctionDef)
            given = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
            for node in (n for statement in function.body for n in ast.walk(statement)):
                if isinstance(node, ast.Name) and node.id in given:
                    found[node.id].add(path.parent.name)
                elif isinstance(node, (ast.Call, ast.Subscript)) and ast.unparse(node).startswith(
                    "kwargs"
                ):
                    found[
                        ast.unparse(
                            node.args[0] if isinstance(node, ast.Call) else node.slice
                        ).strip("'")
                    ].add(path.parent.name)
    return found


def test_eager_code_reads_only_supported_keywords(hugging_face: ModuleType) -> None:
    """Every keyword that eager code reads has an effect on our attention too."""
    from pytransformer.integrations.hugging_face import keywords

    read = read_by_eager_code(Path(hugging_face.__file__).parent)
    assert read.keys() >= {"query", "softcap", "position_bias"}
    assert not read.keys() & keywords.HARMLESS.keys()
    named = set(inspect.signature(pt.integrations.hugging_face.attention_forward).parameters)
    others = {"query_states": "query", "key_states": "key", "value_states": "value"}  # positional
    assert {others.get(name, name) for name in read} <= named | keywords.HONOURED


def test_options_of_generate_are_ignored(ours: ModuleType) -> None:
    """Models with a generate method pass them all to attention (Parakeet)."""
    options = dict(
        max_new_tokens=5,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        logits_to_keep=1,
    )
    assert torch.equal(call(ours, **options)[0], call(ours)[0])


def test_masks_that_a_model_extends_are_dense(ours: ModuleType, masking: ModuleType) -> None:
    """DeepSeek V4 adds columns to a mask tensor and passes other masks unchanged."""
    config = SimpleNamespace(model_type="deepseek_v4")
    arguments: dict[str, Any] = dict(
        attention_mask=torch.tensor([[False, True, True, True]]), dtype=torch.float32, config=config
    )
    mask = ours.attention_mask(1, 4, 4, **arguments)
    assert type(mask) is torch.Tensor and torch.equal(
        mask, masking.eager_mask(1, 4, 4, **arguments)
    )
    assert torch.equal(as_dense(ours, mask, (1, 1, 4, 4))[..., 1:, :], (mask == 0)[..., 1:, :])


def test_selected_indices_are_limited_to_visible_keys(ours: ModuleType) -> None:
    indices = torch.tensor([[[0, 3], [1, 3], [1, 2], [0, 3]]], dtype=torch.int32)
    kept = torch.zeros(1, 1, 4, 4, dtype=torch.bool).scatter_(-1, indices.long()[:, None], True)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    got = call(ours, ours.attention_mask(1, 4, 4), indices=indices)[0]
    assert torch.equal(got, call(ours, kept & causal)[0])
    additive = torch.zeros(1, 1, 4, 4).masked_fill(~causal, torch.finfo(torch.float32).min)
    torch.testing.assert_close(call(ours, additive, indices=indices)[0], got)
    assert not torch.allclose(call(ours, ours.attention_mask(1, 4, 4))[0], got)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_share_the_softmax(ours: ModuleType, name: str) -> None:
    """A sink is one more key with a given score and a value of zero."""
    x = torch.linspace(-1, 1, 64).view(1, 2, 4, 8)
    sinks = (
        torch.tensor([0.3, -2.0], requires_grad=True)
        if name == "s_aux"
        else torch.randn(1, 2, 4, 1, requires_grad=True)
    )
    scores = (x @ x.mT / 8**0.5).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
    column = sinks.view(1, 2, 1, 1).expand(1, 2, 4, 1) if name == "s_aux" else sinks
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    want = (weights @ x).transpose(1, 2)
    out, got_weights = call(
        ours, ours.attention_mask(1, 4, 4), output_attentions=True, **{name: sinks}
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(got_weights, weights)
    gradients = [
        torch.autograd.grad((o * torch.arange(64.0).view(1, 4, 2, 8)).sum(), sinks)[0]
        for o in (out, want)
    ]
    torch.testing.assert_close(*gradients)


# ---- a mask object serves only our attention


class Config:
    model_type = "toy"


def test_operations_on_a_mask_see_the_eager_mask(ours: ModuleType, masking: ModuleType) -> None:
    """Models add it to scores, slice, convert, compare and measure it."""
    real = torch.tensor([[False, True, True, True]])
    scores = torch.linspace(-1, 1, 32).view(1, 2, 4, 4)
    touches: list[Any] = [
        lambda m: scores + m, lambda m: m + scores, lambda m: 1.0 - m,
        lambda m: torch.add(scores, m), lambda m: m[:, :, 1:, :3],
        lambda m: m.dtype, lambda m: m.to(torch.float64), lambda m: m == 0,
        lambda m: m.masked_fill(scores > 0, 0.0),
        lambda m: torch.where(m == 0, scores, 0), lambda m: scores.masked_fill(m < 0, 0),
        lambda m: torch.cat([m, m], 1),
        lambda m: m.unsqueeze(1), lambda m: torch.zeros_like(m), lambda m: m.shape,
        lambda m: (m.ndim, m.dim(), len(m)),
        lambda m: (m.size(), m.size(2), m.device), lambda m: torch.stack(list(m)),
        lambda m: scores.clone().add_(m),
        lambda m: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores,
            attn_mask=m), lambda m: m.clone().fill_(1),
    ]  # fmt: skip
    for function in (masking.causal_mask_function, masking.bidirectional_mask_function):
        arguments: dict[str, Any] = dict(
            mask_function=function, attention_mask=real, dtype=torch.float32, config=Config()
        )
        mask, exact = (
            ours.attention_mask(1, 4, 4, **arguments),
            masking.eager_mask(1, 4, 4, **arguments),
        )
        for touch in touches:
            got, want = touch(mask), touch(exact)
            assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
        assert mask.is_floating_point()


def test_writing_into_a_mask_is_refused(ours: ModuleType) -> None:
    mask = ours.attention_mask(1, 4, 4, config=Config())

    def add_in_place() -> None:
        nonlocal mask
        mask += 1

    for write in (
        lambda: mask.__setitem__(0, 1), add_in_place,
        lambda: mask.masked_fill_(torch.ones(4) > 0, 0), lambda: mask.add_(1),
        lambda: torch.add(torch.ones(4), 1, out=mask), lambda: torch.nn.init.zeros_(mask),
    ):  # fmt: skip
        with pytest.raises(
            ValueError,
            match=r"'toy'.* writes into its attention mask .*attn_implementation='eager'",
        ):
            write()


def test_models_that_read_masks_as_bool_get_the_sdpa_mask(
    ours: ModuleType, masking: ModuleType
) -> None:
    """Nemotron ASR hides where ``logical_not`` of its mask is True and zeroes rows of all zeros.

    That is the reverse of eager code's additive mask.
    """
    real = torch.tensor([[True, True, False]])
    for model_type in ("toy", "nemotron_asr_streaming_encoder"):
        mask = ours.attention_mask(
            1, 3, 3, attention_mask=real, config=SimpleNamespace(model_type=model_type)
        )
        seen = masking.sdpa_mask(1, 3, 3, attention_mask=real, allow_is_causal_skip=False)
        if model_type == "toy":
            assert torch.equal(mask == 0.0, seen)
            assert mask.dtype == torch.float32
        else:
            assert torch.equal(mask.logical_not(), ~seen)
            assert torch.equal(~mask, ~seen)
            assert mask.dtype == torch.bool


def test_only_masks_that_hide_nothing_become_none(ours: ModuleType, masking: ModuleType) -> None:
    """Eager code gets None in the same cases; causality is always explicit."""
    both_ways: dict[str, Any] = dict(
        mask_function=masking.bidirectional_mask_function, allow_is_bidirectional_skip=True
    )
    assert ours.attention_mask(1, 4, 4, **both_ways) is None
    assert (
        ours.attention_mask(1, 4, 4, attention_mask=torch.ones(1, 4, dtype=torch.bool), **both_ways)
        is None
    )
    assert (
        ours.attention_mask(
            1, 4, 4, attention_mask=torch.zeros(1, 4, dtype=torch.bool), **both_ways
        )
        is not None
    )
    for lengths in ((4, 4), (1, 4), (2, 4)):
        assert ours.attention_mask(1, *lengths, lengths[1] - lengths[0]) is not None


def test_masks_can_be_moved_and_copied(ours: ModuleType) -> None:
    real = torch.tensor([[True, True, False]])
    mask = ours.attention_mask(1, 3, 3, attention_mask=real)
    assert (
        ours.attention_mask(1, 1, 9, attention_mask=mask) is mask
    )  # generate prepares masks before the model does
    assert mask.contiguous() is mask.detach() is mask
    there = mask.to("meta")
    assert (there.padding.device.type, there.device.type, there.causal) == (
        "meta",
        "meta",
        "bottom_right",
    )
    twin = copy.deepcopy(mask)
    assert torch.equal(as_dense(ours, twin, (1, 1, 3, 3)), as_dense(ours, mask, (1, 1, 3, 3)))


def test_one_query_masks_broadcast(ours: ModuleType, masking: ModuleType) -> None:
    """BridgeTower builds one row, which eager code broadcasts."""
    real = torch.tensor([[False, True, True, True]])
    window = masking.sliding_window_causal_mask_function(2)
    for function in (masking.bidirectional_mask_function, masking.causal_mask_function, window):
        arguments: dict[str, Any] = dict(q_offset=3, mask_function=function, attention_mask=real)
        exact = masking.sdpa_mask(1, 1, 4, allow_is_causal_skip=False, **arguments)
        got = as_dense(ours, ours.attention_mask(1, 1, 4, **arguments), (1, 1, 4, 4))
        assert torch.equal(got, exact.expand(1, 1, 4, 4))


def test_masks_of_other_lengths_are_refused(ours: ModuleType) -> None:
    for lengths in ((3, 4), (4, 5), (1, 5)):
        with pytest.raises(ValueError, match=r"has 4 queries and 4 keys, and its mask is for"):
            call(ours, ours.attention_mask(1, *lengths))


def test_masks_of_batch_one_broadcast(ours: ModuleType) -> None:
    query, key = torch.randn(1, 2, 3, 8), torch.randn(4, 2, 5, 8)
    module = SimpleNamespace(is_causal=False)
    with pt.use_backend(attention="reference"):
        out, _ = ours.attention_forward(module, query, key, key, None)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2)
    torch.testing.assert_close(out, want)
    assert out.is_contiguous()
