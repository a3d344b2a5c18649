# SPDX-License-Identifier: Apache-2.0
"""Every argument of every compat function has an effect or is refused, as docs/compat.md lists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer.compat._aligned as aligned
import pytransformer.compat.flash_attn as flash_attn
import pytransformer.compat.xformers as xops
from pytransformer.compat.liger import LigerFusedLinearCrossEntropyLoss

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compat.md"
HEADS, WIDTH = 2, 8


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HEADS, WIDTH)


def loss(**arguments: Any) -> torch.Tensor:
    """Build the module with some arguments and call it with the others."""
    forward = inspect.signature(LigerFusedLinearCrossEntropyLoss.forward).parameters
    called = {name: arguments.pop(name) for name in forward if name in arguments}
    return LigerFusedLinearCrossEntropyLoss(**arguments)(**called)


SCORES = {
    "softmax_scale": 0.9, "causal": True, "window_size": (1, 0), "softcap": 0.5,
    "alibi_slopes": torch.ones(HEADS),
}  # fmt: skip
DENSE = {**SCORES, "dropout_p": 0.9, "deterministic": True, "return_attn_probs": True}
ENDS = {
    "cu_seqlens_q": torch.tensor([0, 2, 4]), "cu_seqlens_k": torch.tensor([0, 3, 6]),
    "max_seqlen_q": 2, "max_seqlen_k": 3,
}  # fmt: skip
OTHER_ENDS = {
    "cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 2, 5]),
    "max_seqlen_q": 1, "max_seqlen_k": 1,
}  # fmt: skip
ANGLES = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.3])  # two pairs: one has no order


def subjects() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Return by name the function, a valid call, and another value for each argument."""
    pools = {"k": rows(2, 4), "v": rows(2, 4), "block_table": torch.tensor([[0], [1]])}
    cache = {
        "q": rows(2, 2),
        "k_cache": rows(2, 8),
        "v_cache": rows(2, 8),
        "k": rows(2, 2),
        "v": rows(2, 2),
        "cache_seqlens": 4,
    }
    turning = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
    loss_call = {
        "lin_weight": torch.randn(5, 8),
        "_input": torch.randn(4, 8),
        "target": torch.tensor([0, 1, 2, 1]),
    }
    return {
        "flash_attn_func": (
            flash_attn.flash_attn_func, {"q": rows(1, 4), "k": rows(1, 6), "v": rows(1, 6)},
            {"q": rows(1, 4), "k": rows(1, 6), "v": rows(1, 6), **DENSE},
        ),
        "flash_attn_qkvpacked_func": (flash_attn.flash_attn_qkvpacked_func, {"qkv": rows(1, 4, 3)},
            {"qkv": rows(1, 4, 3), **DENSE}),
        "flash_attn_kvpacked_func": (
            flash_attn.flash_attn_kvpacked_func, {"q": rows(1, 4), "kv": rows(1, 6, 2)},
            {"q": rows(1, 4), "kv": rows(1, 6, 2), **DENSE},
        ),
        "flash_attn_varlen_func": (
            flash_attn.flash_attn_varlen_func, {"q": rows(4), "k": rows(6), "v": rows(6), **ENDS},
            {"q": rows(4), "k": rows(6), "v": rows(6), **OTHER_ENDS, **DENSE, "block_table": pools},
        ),
        "flash_attn_varlen_qkvpacked_func": (
            flash_attn.flash_attn_varlen_qkvpacked_func,
            {"qkv": rows(4, 3), "cu_seqlens": ENDS["cu_seqlens_q"], "max_seqlen": 2},
            {"qkv": rows(4, 3), "cu_seqlens": OTHER_ENDS["cu_seqlens_q"], "max_seqlen": 1, **DENSE},
        ),
        "flash_attn_varlen_kvpacked_func": (
            flash_attn.flash_attn_varlen_kvpacked_func, {"q": rows(4), "kv": rows(6, 2), **ENDS},
            {"q": rows(4), "kv": rows(6, 2), **OTHER_ENDS, **DENSE},
        ),
        "flash_attn_with_kvcache": (
            flash_attn.flash_attn_with_kvcache, {**cache, **turning},
            {
                **{name: rows(*cache[name].shape[:2]) for name in ("q", "k_cache", "v_cache", "k",
                    "v")}, **SCORES, "causal": True,
                "rotary_cos": -ANGLES.cos(), "rotary_sin": -ANGLES.sin(), "cache_seqlens": 3,
                "rotary_interleaved": False,
                "cache_batch_idx": torch.tensor([1, 0]), "cache_leftpad": torch.tensor([2, 0]),
                "num_splits": 2,
                "block_table": torch.tensor([[1], [0]]), "return_softmax_lse": True,
            },
        ),
        "memory_efficient_attention": (
            xops.memory_efficient_attention,
            {"query": rows(1, 4), "key": rows(1, 6), "value": rows(1, 6)},
            {
                "query": rows(1, 4), "key": rows(1, 6), "value": rows(1, 6),
                "attn_bias": xops.LowerTriangularMask(), "p": 0.9,
                "scale": 0.9, "op": object(),
            },
        ),
        "LigerFusedLinearCrossEntropyLoss": (
            loss, loss_call,
            {
                **loss_call, "lin_weight": torch.randn(5, 8), "_input": torch.randn(4, 8),
                "target": torch.tensor([3, 1, 2, 1]),
                "bias": torch.randn(5), "ce_weight": torch.arange(1.0, 6.0), "ignore_index": 1,
                "lse_square_scale": 0.1, "label_smoothing": 0.2,
                "reduction": "sum", "softcap": 2.0, "return_z_loss": True,
                "accum_dtype": torch.bfloat16, "use_token_scaling": True,
                "return_token_accuracy": True, "return_predicted_tokens": True,
            },
        ),
    }  # fmt: skip


def parameters(name: str) -> set[str]:
    function = subjects()[name][0]
    if function is not loss:
        return set(inspect.signature(function).parameters)
    signatures = (LigerFusedLinearCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss.forward)
    return {argument for each in signatures for argument in inspect.signature(each).parameters} - {
        "self"
    }


def outcome(function: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call; copy the caches, because a call writes into them."""
    copied = {k: v.clone() if k.endswith("_cache") else v for k, v in arguments.items()}
    result = function(**copied)
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """Return by function the arguments that docs/compat.md lists as supported and as refused."""
    lines = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {
        name: (set(re.findall(r"`(\w+)`", yes)), set(re.findall(r"`(\w+)`", no)))
        for name, yes, no in lines
    }


def test_documented_table_names_every_function_and_argument() -> None:
    table = documented()
    assert table.keys() == subjects().keys()
    for name, (supported, refused) in table.items():
        assert supported | refused == parameters(name), name
        exported = {
            *flash_attn.__all__,
            "memory_efficient_attention",
            "LigerFusedLinearCrossEntropyLoss",
        } - {"bert_padding"}
        assert exported == table.keys()


@pytest.mark.parametrize("name", subjects())
def test_every_argument_has_an_effect_or_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supported argument changes the result, reaches the op or is checked."""
    function, call, others = subjects()[name]
    _, refused = documented()[name]
    assert others.keys() == parameters(name)
    seen: list[bool] = []
    for op in ("attention", "attention_varlen"):
        original = getattr(aligned, op)
        record = lambda *args, _original=original, **kwargs: (
            seen.append(kwargs["deterministic"]),
            _original(*args, **kwargs),
        )[1]
        monkeypatch.setattr(aligned, op, record)
    base = outcome(function, call)
    for argument, other in others.items():
        changed = (
            {**call, argument: other}
            if argument != "block_table" or name == "flash_attn_with_kvcache"
            else {**call, **other}
        )
        if argument in refused:
            with pytest.raises(
                (TypeError, ValueError), match=rf"^{name}: {argument} must be .*; \w"
            ):
                function(**changed)
        elif argument == "deterministic":
            seen.clear()
            outcome(function, changed), outcome(function, call)
            assert seen == [True, False]
        elif argument.startswith("max_seqlen"):
            with pytest.raises(ValueError, match=argument):  # smaller than the longest sequence
                function(**changed)
        else:
            results = outcome(function, changed)
            same = len(results) == len(base) and all(
                a.shape == b.shape and torch.equal(a, b) for a, b in zip(results, base)
            )
            assert not same, f"{name}: {argument} changes nothing"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("flash_attn_func", {"causal": "top_left"}, "causal must be a bool"),
    ("flash_attn_func", {"window_size": None}, "window_size must be"),
    ("flash_attn_func", {"window_size": (None, 0)}, "window_size must be"),
    ("flash_attn_func", {"alibi_slopes": [0.5, 0.5]}, "alibi_slopes must be"),
    ("flash_attn_func", {"alibi_slopes": torch.ones(3, HEADS)}, "alibi_slopes must be"),
    ("flash_attn_with_kvcache", {"v": None}, "k and v must both be"),
    ("flash_attn_with_kvcache", {"rotary_sin": None}, "rotary_cos and rotary_sin must both be"),
    ("flash_attn_with_kvcache", {"cache_seqlens": None}, "cache_seqlens must be"),
    ("flash_attn_with_kvcache", {"k": None, "v": None}, "rotary_cos must be None"),
    ("flash_attn_with_kvcache",
        {"block_table": torch.tensor([[1], [0]]), "cache_batch_idx": torch.tensor([1, 0])},
        "cache_batch_idx"),
    ("flash_attn_with_kvcache", {"q": rows(2, 2).requires_grad_()},
        "q, k, v and the cache have no gradients"),
    ("memory_efficient_attention", {"attn_bias": torch.ones(1, 1, 4, 6, dtype=torch.bool)},
        "attn_bias must be floating"),
    ("memory_efficient_attention", {"attn_bias": torch.ones(4, 6)},
        "attn_bias must be floating with 4 dimensions"),
    ("memory_efficient_attention", {"attn_bias": object()}, "attn_bias must be a tensor or a mask"),
    ("memory_efficient_attention", {"attn_bias": xops.AttentionBias()}, "attn_bias must be a mask"),
    ("memory_efficient_attention", {"query": torch.randn(4, 6)},
        "query, key and value must all have"),
    ("memory_efficient_attention", {"attn_bias": xops.BlockDiagonalMask.from_seqlens([3], [6])},
        "query must be a batch of 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, changes, message", REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_values_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    function, call, _ = subjects()[name]
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: {message}.*; \w"):
        function(**{**call, **changes})


def test_masks_refuse_wrong_sizes_by_name() -> None:
    for build, message in (
        (
            lambda: xops.LowerTriangularFromBottomRightMask().make_local_attention(0),
            "window_size must be at least 1",
        ),
        (lambda: xops.LocalAttentionFromBottomRightMask(-1, 0), "window_left must be at least 0"),
        (
            lambda: xops.BlockDiagonalMask([1], [1, 2]),
            "q_seqlen and kv_seqlen must have one length",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^\w+: {message}.*; \w"):
            build()
