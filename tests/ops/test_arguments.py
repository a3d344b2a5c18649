# SPDX-License-Identifier: Apache-2.0
"""Properties of every public op's arguments, generated from the signatures.

Each argument has an effect or raises, scalars may come from NumPy, and tensor subclasses with a
meaning are lowered or refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import pytransformer as pt
from pytransformer.ops import public

OPS = (*public.__all__, "scaled_dot_product_attention", "attention_weights", "attention_summary")
B, H, L, D = 2, 2, 6, 8
LENGTHS, POSITIONS = torch.tensor([4, 6]), torch.arange(L).repeat(B, 1)
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 1]).repeat(B, 1)
ANGLES = pt.RotaryPositions(D).tables(torch.arange(L) + 3)
HALF = pt.RotaryPositions(D // 2).tables(torch.arange(L) + 3)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attended(**more: Any) -> dict[str, Any]:
    q, k, v = torch.randn(3, B, H, L, D, generator=torch.Generator().manual_seed(0)).unbind()
    return {"query": q, "key": k, "value": v, **more}


def with_lse(op: str) -> Callable[[], dict[str, Any]]:
    def arguments() -> dict[str, Any]:
        given = attended()
        lse = pt.attention(**given, return_lse=True)[1]
        return {"query": given["query"], "key": given["key"], "lse": lse}

    return arguments


def packed() -> dict[str, Any]:
    given = {n: t.transpose(1, 2).flatten(0, 1) for n, t in attended().items()}
    offsets = torch.tensor([0, 5, 12])
    return given | {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 7, "max_seqlen_k": 7
    }  # fmt: skip


def appended() -> dict[str, Any]:
    cache = pt.KeyValues(torch.zeros(B, H, L, D), torch.zeros(B, H, L, D))
    return attended(cache=cache, positions=POSITIONS)


BASE: dict[str, Callable[[], dict[str, Any]]] = {
    "attention": attended,
    "attention_varlen": packed,
    "attention_weights": with_lse("attention_weights"),
    "attention_summary": with_lse("attention_summary"),
    "scaled_dot_product_attention": attended,
    "layer_norm": lambda: {"x": rand(B, L, D), "normalized_shape": D},
    "rms_norm": lambda: {"x": rand(B, L, D), "normalized_shape": D},
    "add_norm": lambda: {"x": rand(B, L, D), "residual": rand(1, B, L, D)[0], "weight": None},
    "feed_forward": lambda: {
        "x": rand(B, L, D), "w1": rand(10, D), "b1": None, "w2": rand(D, 10), "b2": None
    },
    "linear_cross_entropy": lambda: {
        "x": rand(B, L, D), "weight": rand(5, D), "target": torch.arange(B * L).view(B, L) % 5
    },
    "rotary": lambda: {"x": rand(B, H, L, D)},
    "append_kv": appended,
}  # fmt: skip

SCORES: dict[str, Any] = {
    "causal": "top_left",
    "window": (1, 1),
    "global_keys": 2,
    "bias": pt.AlibiBias(torch.tensor([0.5, 0.25])),
    "sinks": torch.tensor([0.5, 1.0]),
    "softcap": 0.5,
    "scale": 0.75,
}
MASKS: dict[str, Any] = {
    "attn_mask": (torch.arange(L) + 2 * torch.arange(L)[:, None]) % 5 != 1,
    "query_lengths": LENGTHS,
    "key_lengths": LENGTHS,
    "prefix_lengths": torch.tensor([2, 3]),
    "query_segments": SEGMENTS,
    "key_segments": SEGMENTS,
}
# A value other than the default for each optional argument of each op.
CHANGED: dict[str, dict[str, Any]] = {
    "attention": {
        **SCORES, **MASKS, "dropout_p": 0.5,
        "page_table": torch.tensor([[1], [0]]), "key_scale": torch.ones(()),
        "value_scale": torch.ones(()),
    },
    "attention_varlen": {
        **SCORES, "dropout_p": 0.5, "key_lengths": LENGTHS,
        "page_table": torch.tensor([[1], [0]]), "key_scale": torch.ones(()),
        "value_scale": torch.ones(()),
    },
    "attention_weights": {**SCORES, **MASKS, "rows": [1, 5], "heads": [1]},
    "attention_summary": {**SCORES, **MASKS, "kinds": ("distance",)},
    "scaled_dot_product_attention": {
        "attn_mask": MASKS["attn_mask"], "dropout_p": 0.5, "is_causal": True, "scale": 0.75
    },
    "layer_norm": {"weight": rand(D), "bias": rand(D), "eps": 0.5},
    "rms_norm": {"weight": rand(D), "eps": 0.5},
    "add_norm": {
        "weight": rand(D), "bias": rand(D), "eps": 0.5, "dropout_p": 0.5, "kind": "rms"
    },
    "feed_forward": {
        "b1": rand(10), "b2": rand(D), "activation": "silu", "gate_weight": rand(10, D),
        "gate_bias": rand(10), "dropout_p": 0.5,
    },
    "linear_cross_entropy": {
        "bias": rand(5), "ignore_index": 3, "label_smoothing": 0.25, "reduction": "sum",
        "class_weight": torch.tensor([1.0, 0.5, 2.0, 0.25, 3.0]), "softcap": 0.5,
        "z_loss_weight": 0.25,
    },
    "rotary": {
        "positions": POSITIONS + 1, "cos": ANGLES[0], "sin": ANGLES[1], "base": 50.0,
        "frequencies": torch.tensor([1.0, 0.5, 0.25, 0.125]),
        "scaling": pt.RotaryScaling("linear", 2.0), "dims": 4, "interleaved": True,
        "weight": rand(D), "eps": 0.5, "weight_offset": 1.0,
    },
    "append_kv": {
        "rotary": pt.RotaryPositions(D), "interleaved": True, "dims": 4, "q_norm": rand(D),
        "k_norm": rand(D), "eps": 0.5, "weight_offset": 1.0,
    },
}  # fmt: skip
# Arguments that belong together, beside pairs of CHANGED: calls in which they have an effect.
EIGHT_BITS = {n: (9 * rand(B, H, L, D + i)).to(torch.int8) for i, n in enumerate(("key", "value"))}
EIGHT_BITS["value"] = EIGHT_BITS["value"][..., :D]
OVER_PAGES = {
    "page_table": torch.tensor([[1], [0]]), "key_lengths": LENGTHS, "cu_seqlens_k": None,
    "max_seqlen_k": None,
}  # fmt: skip
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "attention_varlen": [
        {**OVER_PAGES, **{n: t.float() for n, t in EIGHT_BITS.items()}},
        {**OVER_PAGES, **EIGHT_BITS, "key_scale": torch.ones(()), "value_scale": torch.ones(())},
    ],
    "attention": [
        {"query_segments": SEGMENTS, "key_segments": SEGMENTS},
        {"page_table": torch.tensor([[1], [0]]), "key_lengths": LENGTHS},
        {**EIGHT_BITS, "key_scale": torch.ones(()), "value_scale": torch.ones(())},
    ],
    "attention_weights": [{"query_segments": SEGMENTS, "key_segments": SEGMENTS}],
    "attention_summary": [{"query_segments": SEGMENTS, "key_segments": SEGMENTS}],
    "rotary": [
        {"cos": ANGLES[0], "sin": ANGLES[1]},
        {"cos": HALF[0], "sin": HALF[1], "dims": 4},
        {"positions": POSITIONS, "weight": rand(D)},
        {"positions": POSITIONS, "frequencies": torch.tensor([0.5, 0.3])},
        {"cos": ANGLES[0], "sin": ANGLES[1], "weight": rand(D)},
    ],
    "append_kv": [
        {"rotary": ANGLES},
        {"rotary": HALF, "dims": 4},
    ],
}
# Arguments that may have no effect, each with its reason.
WITHOUT_EFFECT = {
    "backend": "chooses who computes the same values",
    "strict": "chooses between an error and the reference",
    "deterministic": "False permits another order of sums; it requires none",
    "recompute": "exchanges memory for time",
    "return_lse": "adds an output",
    "return_z_loss": "adds an output",
    "return_accuracy": "adds an output",
    "dropout_seed": "models pass it on in evaluation, where dropout_p is 0",
    "enable_gqa": "permits grouped heads, as in PyTorch",
}
WITHOUT_EFFECT_IN = {  # the same, for one op
    (op, "sinks"): "lse includes the sinks" for op in ("attention_weights", "attention_summary")
}


def optional(op: str) -> list[str]:
    """Return the optional arguments of a public op, with those of ``**mask_and_bias_args``."""
    from pytransformer.ops.attention_weights import MASK_AND_BIAS

    parameters = inspect.signature(getattr(pt, op)).parameters.values()
    names = [p.name for p in parameters if p.default is not p.empty]
    keywords = any(p.kind is p.VAR_KEYWORD and p.name != "unknown" for p in parameters)
    return names + (sorted(MASK_AND_BIAS) if keywords else [])


def run(op: str, changes: dict[str, Any]) -> list[torch.Tensor]:
    """Return outputs and gradients of every floating tensor of the base call, with a fixed seed."""
    given = BASE[op]() | changes
    frozen = {"page_table", "key_scale", "value_scale"} & changes.keys()
    learned = op not in ("append_kv", "attention_summary") and not frozen
    if learned:
        for name, t in given.items():
            if name in BASE[op]() and isinstance(t, torch.Tensor) and t.is_floating_point():
                given[name] = t.detach().requires_grad_()
    leaves = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(0)
    outs = getattr(pt, op)(**given)
    outs = (
        list(outs.values())
        if isinstance(outs, dict)
        else list(outs)
        if isinstance(outs, tuple)
        else [outs]
    )
    outs += [given["cache"].key, given["cache"].value] if "cache" in given else []
    if learned:
        total = sum(o.square().sum() for o in outs)
        outs += [g for g in torch.autograd.grad(total, leaves, allow_unused=True) if g is not None]
    return [o.detach() for o in outs]


def outcome(op: str, changes: dict[str, Any]) -> list[torch.Tensor] | None:
    """Return the result of :func:`run`, or None if the call raises for its arguments."""
    try:
        return run(op, changes)
    except (TypeError, ValueError):
        return None


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b)
    )


def calls(op: str) -> list[dict[str, Any]]:
    """Yield no optional argument, each alone, and those that belong together."""
    return [{}, *({name: value} for name, value in CHANGED[op].items()), *TOGETHER.get(op, ())]


def ignored(op: str, name: str) -> tuple[list[list[str]], int]:
    """Return the calls in which an argument has no effect and does not raise.

    Return also the number of calls in which it has an effect.
    """
    silent, acts = [], 0
    for call in calls(op):
        without = outcome(op, {n: v for n, v in call.items() if n != name})
        found = outcome(op, call | {name: CHANGED[op][name]})
        if found is not None and without is not None and same(found, without):
            silent.append(list(call))
        else:
            acts += found is not None
    return silent, acts


@pytest.mark.parametrize("op", OPS)
def test_every_optional_argument_acts_or_raises(op: str) -> None:
    assert set(optional(op)) - set(WITHOUT_EFFECT) <= set(CHANGED[op]), (
        "give a value to the new argument"
    )
    for name in CHANGED[op]:
        silent, acts = ignored(op, name)
        if (op, name) not in WITHOUT_EFFECT_IN:
            assert not silent, f"{op}: {name} has no effect and raises nothing beside {silent}"
            assert acts, f"{op}: no call shows an effect of {name}"


# ---- tensor subclasses


class Named(torch.Tensor):
    """A subclass without a protocol: its storage holds its values."""


class Scaled(torch.Tensor):
    """A subclass whose values differ from its storage, by ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Packed(torch.Tensor):
    """A subclass whose values differ, by ``__torch_dispatch__``, like quantized weights."""

    @staticmethod
    def __new__(cls, t: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}")


def masked(t: torch.Tensor) -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(t, torch.ones_like(t, dtype=torch.bool))


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda t: t.as_subclass(Named),
    "Parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "Buffer": lambda t: torch.nn.Buffer(t),
}
MEANINGFUL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "test_arguments.Scaled": lambda t: t.as_subclass(Scaled),
    "MaskedTensor": masked,
    "CausalBias": lambda t: causal_upper_left(L, L),
}


def places(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Yield (position, argument) with each tensor of an argument changed in turn."""
    if isinstance(value, torch.Tensor):
        yield "", change(value)
    elif isinstance(value, pt.AlibiBias):
        yield ".slopes", pt.AlibiBias(change(value.slopes))
    elif isinstance(value, pt.RelativePositionBias):
        yield ".table", pt.RelativePositionBias(change(value.table))
    elif isinstance(value, tuple):
        for i, t in enumerate(value):
            if isinstance(t, torch.Tensor):
                parts = [*value[:i], change(t), *value[i + 1 :]]
                yield (
                    f"[{i}]",
                    type(value)(*parts) if isinstance(value, pt.KeyValues) else tuple(parts),
                )


def with_a_subclass(
    op: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, Any]]:
    """Yield (argument, call) for every tensor of every call; only that tensor is invalid."""
    seen = set()
    extra = [{"bias": pt.RelativePositionBias(rand(8, H))}] if "bias" in CHANGED[op] else []
    for call in (*calls(op), *extra):
        if outcome(op, call) is None:
            continue
        for name, value in (BASE[op]() | call).items():
            for where, changed in places(value, change):
                kind = (name + where, name in call, type(value))
                if kind not in seen:
                    seen.add(kind)
                    yield name + where, (BASE[op]() | call | {name: changed})


def values(op: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """Return the outputs of a call without gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        out = getattr(pt, op)(**given)
    outs = list(out.values()) if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
    return [o.as_subclass(torch.Tensor) for o in outs]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_subclass_without_a_protocol_is_a_plain_tensor(op: str, kind: str) -> None:
    for (name, given), (_, same_call) in zip(
        with_a_subclass(op, PLAIN[kind]), with_a_subclass(op, lambda t: t)
    ):
        assert same(values(op, given), values(op, same_call)), name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", MEANINGFUL)
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_a_subclass_with_a_meaning_is_refused_by_name(op: str, kind: str) -> None:
    for name, given in with_a_subclass(op, MEANINGFUL[kind]):
        if (kind, name) == ("CausalBias", "attn_mask"):
            continue
        with pytest.raises(
            TypeError, match=rf"\w+: [\w.\[\]]+ must be a plain tensor, got .*{kind}"
        ):
            values(op, given)


@pytest.mark.parametrize("op", OPS)
def test_a_subclass_that_dispatches_gets_the_raw_op(op: str) -> None:
    """The class unwraps itself or refuses; this one refuses."""
    for name, given in with_a_subclass(op, Packed):
        if name == "sinks" and op in ("attention_weights", "attention_summary"):
            continue  # lse contains them already
        with pytest.raises((NotImplementedError, TypeError, RuntimeError)):
            values(op, given)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (6, 3)], ids=str)
def test_a_causal_bias_equals_its_dense_mask(
    bias: Callable[[int, int], torch.Tensor], sizes: tuple[int, int]
) -> None:
    """It becomes ``causal=`` only if no other mask is given; the test adds each other mask."""
    q, k = rand(B, H, sizes[0], D), rand(B, H, sizes[1], D)
    offset = sizes[1] - sizes[0] if bias is causal_lower_right else 0
    dense = torch.ones(sizes, dtype=torch.bool).tril(offset)
    table = pt.RelativePositionBias(rand(8, H))
    lengths = {"query_lengths": torch.tensor([2, 3]), "key_lengths": torch.tensor([3, 2])}
    more = [
        {},
        lengths,
        {"window": (1, 0)},
        {"bias": table},
        {"bias": rand(*sizes)},
        {"causal": "top_left"},
    ]
    more += [{"causal": "bottom_right"}, {"causal": "bottom_right", **lengths}]
    more += [
        {"causal": align, "prefix_lengths": torch.tensor([1, 2])}
        for align in ("top_left", "bottom_right")
    ]
    for options in more:
        for attend in (pt.attention, pt.reference.attention):
            found = attend(q, k, k, attn_mask=bias(*sizes), **options)
            torch.testing.assert_close(
                found, pt.reference.attention(q, k, k, attn_mask=dense, **options)
            )
    for causal in (False, True):
        found = pt.scaled_dot_product_attention(q, k, k, bias(*sizes), is_causal=causal)
        torch.testing.assert_close(
            found, pt.scaled_dot_product_attention(q, k, k, dense, is_causal=causal)
        )
    lse = pt.attention(q, k, k, attn_mask=dense, return_lse=True)[1]
    torch.testing.assert_close(
        pt.attention_weights(q, k, lse, attn_mask=bias(*sizes)),
        pt.attention_weights(q, k, lse, attn_mask=dense),
    )
    with pytest.raises(ValueError, match="attn_mask must be a CausalBias of"):
        pt.attention(q, k, k, attn_mask=bias(sizes[0], sizes[1] + 1))


# ---- scalars


def scalars(op: str) -> Iterator[tuple[str, dict[str, Any], Callable[[Any], Any]]]:
    """Yield (argument, call, setter) for every scalar of every valid call."""
    for call in (
        *calls(op),
        {"dropout_p": 0.5, "dropout_seed": 7},
        {"window": (1, 2), "global_keys": 2},
    ):
        given = BASE[op]() | call
        if (
            not given.keys() <= set(inspect.signature(getattr(pt, op)).parameters)
            or outcome(op, call) is None
        ):
            continue
        for name, value in given.items():
            if type(value) in (int, float):
                yield name, given, lambda write, value=value: write(value)
            elif name == "window":
                yield name, given, lambda write, value=value: tuple(map(write, value))


@pytest.mark.parametrize("op", [op for op in OPS if op != "attention_summary"])
def test_numpy_scalars_and_0_dimensional_tensors_are_numbers(op: str) -> None:
    numpy = pytest.importorskip("numpy", reason="needs NumPy")
    writers = (
        torch.tensor,
        lambda v: (numpy.int64 if isinstance(v, int) else numpy.float32)(v),
        lambda v: (numpy.int32 if isinstance(v, int) else numpy.float64)(v),
    )
    for name, given, write in scalars(op):
        for writer in writers:
            assert same(values(op, given | {name: write(writer)}), values(op, given)), name
        wrong = ["1", True, torch.tensor(True), torch.ones((), requires_grad=True), 1j]
        wrong += (
            [torch.tensor([1])] if name != "dropout_seed" else []
        )  # a seed may have one dimension
        for other in wrong:
            with pytest.raises((TypeError, ValueError), match=name.removesuffix("_seed")):
                values(op, given | {name: write(lambda v, other=other: other)})
