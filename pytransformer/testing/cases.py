"""Named problems shared by the tests and the benchmarks, so that nothing is timed that is not also checked.

A `Case` is an operation, a shape and a builder of its arguments:

    for case in cases("attention", size="small"):
        args, kwargs = case.make("cpu", torch.bfloat16, seed=0)
        out = getattr(pytransformer, case.op)(*args, **kwargs)

`case.resize(Lq=4096, Lk=4096)` gives the same problem at another shape, `leaves(case.op, args, kwargs)` names
the tensors that take a gradient, and `case.flops()` and `case.bytes(dtype)` are the work that a benchmark
divides by.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Builder = Callable[["Draw"], Mapping[str, Any]]

# The positional arguments of each public op that may hold tensors, in order.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "attention": ("query", "key", "value"),
    "attention_varlen": (
        "query",
        "key",
        "value",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
    ),
    "layer_norm": ("x", "normalized_shape", "weight", "bias"),
    "rms_norm": ("x", "normalized_shape", "weight"),
    "add_norm": ("x", "residual", "weight", "bias"),
    "feed_forward": ("x", "w1", "b1", "w2", "b2"),
    "linear_cross_entropy": ("x", "weight", "target"),
}

SIZES: dict[str, dict[str, int]] = {
    # Odd lengths: every tile has a tail.
    "small": {"B": 2, "Hq": 4, "Hkv": 4, "Lq": 67, "Lk": 67, "D": 32, "rows": 37, "d": 96, "hidden": 200, "classes": 131},
    "medium": {
        "B": 2,
        "Hq": 8,
        "Hkv": 8,
        "Lq": 512,
        "Lk": 512,
        "D": 64,
        "rows": 1024,
        "d": 512,
        "hidden": 2048,
        "classes": 4096,
    },
    "large": {
        "B": 1,
        "Hq": 16,
        "Hkv": 16,
        "Lq": 2048,
        "Lk": 2048,
        "D": 64,
        "rows": 8192,
        "d": 1024,
        "hidden": 4096,
        "classes": 32000,
    },
}


@dataclass(frozen=True)
class Draw:
    """What a builder draws from. The generator lives on the CPU, so that a seed means one thing on every
    device."""

    shape: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def __getitem__(self, name: str) -> int:
        return self.shape[name]

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(*size, generator=self.generator, dtype=torch.float32) * scale
        return x.to(device=self.device, dtype=dtype or self.dtype)

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        """Uniform int64 in [low, high]."""
        return torch.randint(low, high + 1, size, generator=self.generator).to(self.device)


@dataclass(frozen=True)
class Case:
    """One named problem. `pairs`: the share of the Lq * Lk pairs that the usual FLOP count takes as
    computed."""

    name: str
    op: str
    shape: Mapping[str, int]
    build: Builder
    tags: frozenset[str] = frozenset()
    pairs: Callable[[Mapping[str, int]], float] | None = None

    def resize(self, **shape: int) -> Case:
        """The same problem at another shape; a change of Hq alone keeps the query heads per key head."""
        new = {**self.shape, **shape}
        if "Hq" in shape and "Hkv" not in shape and "Hkv" in self.shape:
            new["Hkv"] = max(1, shape["Hq"] * self.shape["Hkv"] // self.shape["Hq"])
        return dataclasses.replace(self, shape=new)

    def make(self, device: torch.device | str, dtype: torch.dtype, seed: int, requires_grad: bool = False) -> Arguments:
        """(args, kwargs) of `pytransformer.<op>`. Equal seeds give equal values on every device and in every
        dtype, up to its rounding."""
        generator = torch.Generator().manual_seed(seed)
        values = dict(self.build(Draw(self.shape, torch.device(device), dtype, generator)))
        args = tuple(values.pop(name) for name in ARGUMENTS[self.op] if name in values)
        if requires_grad:
            for leaf in leaves(self.op, args, values).values():
                leaf.requires_grad_()
        return args, values

    def flops(self, direction: str = "fwd") -> float:
        """Floating-point operations by the usual count: 2 per multiply-add of the matrix products.

        Attention: 4 B H Lq Lk D forward (half when causal; only visible pairs for padding and windows),
        backward 2.5 times that. Norms, which no product dominates: 5 per element forward, 10 backward.
        direction: "fwd", "bwd" or "both".
        """
        s = self.shape
        if self.op.startswith("attention"):
            share = self.pairs(s) if self.pairs else 1.0
            forward = 2.0 * s["B"] * s["Hq"] * s["Lq"] * s["Lk"] * (s["D"] + s.get("Dv", s["D"])) * share
            backward = 2.5 * forward
        elif self.op == "feed_forward":
            forward = 2.0 * s["rows"] * s["d"] * s["hidden"] * (3 if "gated" in self.tags else 2)
            backward = 2.0 * forward
        elif self.op == "linear_cross_entropy":
            forward = 2.0 * s["rows"] * s["d"] * s["classes"]
            backward = 2.0 * forward
        else:
            forward, backward = 5.0 * s["rows"] * s["d"], 10.0 * s["rows"] * s["d"]
        return {"fwd": forward, "bwd": backward, "both": forward + backward}[direction]

    def bytes(self, dtype: torch.dtype, direction: str = "fwd") -> int:
        """Least memory traffic: every input read once, every output written once, in `dtype`."""
        s, size = self.shape, torch.empty(0, dtype=dtype).element_size()
        if self.op.startswith("attention"):
            dv = s.get("Dv", s["D"])
            q, out = s["B"] * s["Hq"] * s["Lq"] * s["D"], s["B"] * s["Hq"] * s["Lq"] * dv
            kv = s["B"] * s["Hkv"] * s["Lk"] * (s["D"] + dv)
            forward, backward = q + kv + out, 2 * q + 2 * kv + 2 * out
        elif self.op == "feed_forward":
            weights = s["d"] * s["hidden"] * (3 if "gated" in self.tags else 2)
            forward, backward = 2 * s["rows"] * s["d"] + weights, 3 * s["rows"] * s["d"] + 2 * weights
        elif self.op == "linear_cross_entropy":
            inputs = s["rows"] * s["d"] + s["classes"] * s["d"]
            forward, backward = inputs, 2 * inputs
        else:
            operands = 4 if self.op == "add_norm" else 2  # x, residual -> normed, residual_out
            forward, backward = operands * s["rows"] * s["d"], (operands + 1) * s["rows"] * s["d"]
        return size * {"fwd": forward, "bwd": backward, "both": forward + backward}[direction]


def leaves(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that take a gradient, by name; those inside a bias object are "slopes" and "table"."""
    found = {}
    for name, value in {**dict(zip(ARGUMENTS[op], args)), **kwargs}.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                found[name] = value
        elif name == "bias" and value is not None:
            part = "slopes" if hasattr(value, "slopes") else "table"
            found[part] = getattr(value, part)
    return found


# ---- attention


def _qkv(d: Draw) -> dict[str, Any]:
    return {
        "query": d.normal(d["B"], d["Hq"], d["Lq"], d["D"]),
        "key": d.normal(d["B"], d["Hkv"], d["Lk"], d["D"]),
        "value": d.normal(d["B"], d["Hkv"], d["Lk"], d.shape.get("Dv", d["D"])),
    }


def _attention(**fixed: Any) -> Builder:
    """q, k, v and keywords; a keyword given as a function is called with the Draw."""
    return lambda d: {**_qkv(d), **{k: v(d) if callable(v) else v for k, v in fixed.items()}}


def _alibi(d: Draw) -> Any:
    from pytransformer import AlibiBias

    slopes = 2.0 ** (-8.0 * torch.arange(1, d["Hq"] + 1) / d["Hq"])
    return AlibiBias(slopes.to(d.device))


def _t5(bidirectional: bool) -> Callable[[Draw], Any]:
    def build(d: Draw) -> Any:
        from pytransformer import RelativePositionBias

        return RelativePositionBias(d.normal(32, d["Hq"], dtype=torch.float32), bidirectional, 128)

    return build


def _spread(length: int, batch: int) -> list[int]:
    """Lengths of a padded batch: from all of it down to half, evenly."""
    return [length - (length // 2) * b // max(batch - 1, 1) for b in range(batch)]


def _lengths(name: str) -> Callable[[Draw], torch.Tensor]:
    return lambda d: torch.tensor(_spread(d[name], d["B"]), device=d.device)


def _segments(name: str) -> Callable[[Draw], torch.Tensor]:
    """Four documents of about equal size; equal lengths of query and key give equal boundaries."""
    return lambda d: (torch.arange(d[name], device=d.device) * 4 // max(d[name], 1)).repeat(d["B"], 1)


def _random_mask(d: Draw) -> torch.Tensor:
    keep = torch.rand(d["B"], 1, d["Lq"], d["Lk"], generator=d.generator) > 0.2
    keep[..., :1] = True
    return keep.to(d.device)


def _left_padding(d: Draw) -> torch.Tensor:
    start = torch.randint(0, d["Lk"] // 2 + 1, (d["B"], 1), generator=d.generator)
    start[:1] = 0
    return (torch.arange(d["Lk"]) >= start)[:, None, None, :].to(d.device)


def _offsets(length: int, batch: int) -> list[int]:
    """Row offsets of `batch` packed sequences, each longer than the one before, of batch * length rows
    together."""
    total, parts = batch * length, batch * (batch + 1) // 2
    return [total * (i * (i + 1) // 2) // parts for i in range(batch + 1)]


def _packed(d: Draw) -> dict[str, Any]:
    cu_q, cu_k = (torch.tensor(_offsets(d[name], d["B"])) for name in ("Lq", "Lk"))
    return {
        "query": d.normal(d["B"] * d["Lq"], d["Hq"], d["D"]),
        "key": d.normal(d["B"] * d["Lk"], d["Hkv"], d["D"]),
        "value": d.normal(d["B"] * d["Lk"], d["Hkv"], d.shape.get("Dv", d["D"])),
        "cu_seqlens_q": cu_q.to(d.device),
        "cu_seqlens_k": cu_k.to(d.device),
        "max_seqlen_q": int(cu_q.diff().max()),
        "max_seqlen_k": int(cu_k.diff().max()),
    }


def _varlen(**fixed: Any) -> Builder:
    return lambda d: {**_packed(d), **{k: v(d) if callable(v) else v for k, v in fixed.items()}}


def _prefix(d: Draw) -> torch.Tensor:
    return d.integers(0, d["Lk"] // 2, d["B"])


def _dense(*dims: str | int) -> Callable[[Draw], torch.Tensor]:
    return lambda d: d.normal(*(d[n] if isinstance(n, str) else n for n in dims))


WINDOW = 32  # keys on each side of the diagonal that the window cases see


# Shares of the Lq * Lk pairs, for Case.flops.
Share = Callable[[Mapping[str, int]], float]


def _half(_: Mapping[str, int]) -> float:
    return 0.5


def _window_share(s: Mapping[str, int]) -> float:
    return min(1.0, (WINDOW + 1) / max(s["Lk"], 1))


def _padded_share(*names: str) -> Share:
    def share(s: Mapping[str, int]) -> float:
        rows = zip(*(_spread(s[n], s["B"]) for n in names))
        return sum(math.prod(row) for row in rows) / max(s["B"] * math.prod(s[n] for n in names), 1)

    return share


def _packed_share(s: Mapping[str, int]) -> float:
    """Of B * Lq * Lk, the pairs of the unequal sequences."""
    q, k = _offsets(s["Lq"], s["B"]), _offsets(s["Lk"], s["B"])
    pairs = sum((q[i + 1] - q[i]) * (k[i + 1] - k[i]) for i in range(s["B"]))
    return pairs / max(s["B"] * s["Lq"] * s["Lk"], 1)


def _packed_half(s: Mapping[str, int]) -> float:
    return 0.5 * _packed_share(s)


ATTENTION: dict[str, tuple[Builder, str, Share | None]] = {
    "full": (_attention(), "core", None),
    "causal": (_attention(causal="top_left"), "core causal", _half),
    "causal_bottom_right": (_attention(causal="bottom_right"), "causal", _half),
    "key_padding": (_attention(key_lengths=_lengths("Lk")), "core padding", _padded_share("Lk")),
    "padding": (
        _attention(query_lengths=_lengths("Lq"), key_lengths=_lengths("Lk")),
        "padding",
        _padded_share("Lq", "Lk"),
    ),
    "left_padding": (_attention(attn_mask=_left_padding, causal="top_left"), "padding mask causal", _half),
    "window": (_attention(causal="top_left", window=(WINDOW, 0)), "core window causal", _window_share),
    "segments": (
        _attention(query_segments=_segments("Lq"), key_segments=_segments("Lk")),
        "segments",
        lambda s: 0.25,
    ),
    "prefix": (_attention(causal="top_left", prefix_lengths=_prefix), "prefix causal", _half),
    "bool_mask": (_attention(attn_mask=_random_mask), "core mask", None),
    "float_mask": (_attention(attn_mask=_dense("B", 1, "Lq", "Lk")), "mask bias_grad", None),
    "bias": (_attention(bias=_dense(1, "Hq", "Lq", "Lk")), "core bias bias_grad", None),
    "alibi": (_attention(causal="top_left", bias=_alibi), "bias bias_grad causal", _half),
    "t5_bias": (_attention(bias=_t5(True), scale=1.0), "core bias bias_grad", None),
    "t5_bias_causal": (
        _attention(bias=_t5(False), scale=1.0, causal="top_left"),
        "bias bias_grad causal",
        _half,
    ),
    "softcap": (_attention(softcap=20.0, causal="top_left"), "softcap causal", _half),
    "dropout": (_attention(dropout_p=0.1, dropout_seed=1234), "core dropout", None),
    "everything": (
        _attention(
            causal="bottom_right",
            window=(WINDOW, 0),
            key_lengths=_lengths("Lk"),
            query_lengths=_lengths("Lq"),
            attn_mask=_random_mask,
            bias=_t5(False),
            softcap=20.0,
            dropout_p=0.1,
            dropout_seed=1234,
        ),
        "causal window padding mask bias bias_grad softcap dropout",
        _window_share,
    ),
}

VARLEN: dict[str, tuple[Builder, str, Share]] = {
    "varlen": (_varlen(), "core varlen", _packed_share),
    "varlen_causal": (_varlen(causal="bottom_right"), "varlen causal", _packed_half),
    "varlen_alibi": (
        _varlen(causal="bottom_right", bias=_alibi),
        "varlen causal bias bias_grad",
        _packed_half,
    ),
    "varlen_t5": (_varlen(bias=_t5(True)), "varlen bias bias_grad", _packed_share),
}


def _attention_cases(shape: Mapping[str, int]) -> Iterator[Case]:
    base = {k: shape[k] for k in ("B", "Hq", "Hkv", "Lq", "Lk", "D")}

    def shaped(name: str, build: Builder, tags: str, pairs: Share | None = None, **other: int) -> Case:
        return Case(name, "attention", {**base, **other}, build, frozenset(tags.split()), pairs)

    for name, (build, tags, pairs) in ATTENTION.items():
        yield shaped(name, build, tags, pairs)
    yield shaped("gqa", _attention(causal="top_left"), "core gqa causal", _half, Hkv=max(1, base["Hq"] // 4))
    yield shaped(
        "cross",
        _attention(key_lengths=_lengths("Lk")),
        "padding cross",
        _padded_share("Lk"),
        Lk=2 * base["Lk"] + 1,
    )
    yield shaped("decode", _attention(causal="bottom_right"), "core decode", Lq=1, Lk=4 * base["Lk"])
    yield shaped("value_dim", _attention(), "value_dim", Dv=base["D"] // 2 * 3)
    for name, (build, tags, pairs) in VARLEN.items():
        yield Case(name, "attention_varlen", base, build, frozenset(tags.split()), pairs)


# ---- norms, feed-forward, cross entropy


def _rows(d: Draw) -> dict[str, Any]:
    return {"x": d.normal(d["rows"], d["d"])}


def _norm(weight: bool = True, bias: bool = True, **fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        values = {**_rows(d), "normalized_shape": (d["d"],)}
        if weight:
            values["weight"] = 1 + d.normal(d["d"], scale=0.1)
        if bias:
            values["bias"] = d.normal(d["d"], scale=0.1)
        return {**values, **fixed}

    return build


def _add_norm(kind: str, **fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        values = {
            **_rows(d),
            "residual": d.normal(d["rows"], d["d"]),
            "weight": 1 + d.normal(d["d"], scale=0.1),
        }
        if kind == "layer":
            values["bias"] = d.normal(d["d"], scale=0.1)
        return {**values, "kind": kind, **fixed}

    return build


def _feed_forward(activation: str, gated: bool = False, bias: bool = True, **fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        def weight(*size: int) -> torch.Tensor:
            return d.normal(*size, scale=size[-1] ** -0.5)

        def vector(size: int) -> torch.Tensor | None:
            return d.normal(size, scale=0.1) if bias else None

        values = {
            **_rows(d),
            "w1": weight(d["hidden"], d["d"]),
            "b1": vector(d["hidden"]),
            "w2": weight(d["d"], d["hidden"]),
            "b2": vector(d["d"]),
            "activation": activation,
        }
        if gated:
            values |= {"gate_weight": weight(d["hidden"], d["d"]), "gate_bias": vector(d["hidden"])}
        return {**values, **fixed}

    return build


def _cross_entropy(**fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        target = d.integers(0, d["classes"] - 1, d["rows"])
        target[::7] = -100
        weight = d.normal(d["classes"], d["d"], scale=d["d"] ** -0.5)
        return {**_rows(d), "weight": weight, "target": target, **fixed}

    return build


SEEDED: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 1234}
ROWWISE: dict[str, tuple[str, Builder, str]] = {
    "layer_norm": ("layer_norm", _norm(), "core"),
    "layer_norm_plain": ("layer_norm", _norm(weight=False, bias=False), ""),
    "rms_norm": ("rms_norm", _norm(bias=False, eps=1e-6), "core"),
    "add_norm": ("add_norm", _add_norm("layer"), "core"),
    "add_norm_dropout": ("add_norm", _add_norm("layer", **SEEDED), "core dropout"),
    "add_rms_norm": ("add_norm", _add_norm("rms", eps=1e-6), ""),
    "feed_forward_relu": ("feed_forward", _feed_forward("relu"), ""),
    "feed_forward_gelu": ("feed_forward", _feed_forward("gelu"), "core"),
    "feed_forward_gelu_tanh": ("feed_forward", _feed_forward("gelu_tanh"), ""),
    "feed_forward_swiglu": ("feed_forward", _feed_forward("silu", gated=True, bias=False), "gated"),
    "feed_forward_dropout": ("feed_forward", _feed_forward("relu", **SEEDED), "dropout"),
    "feed_forward_recompute": ("feed_forward", _feed_forward("gelu", recompute=True), "recompute"),
    "linear_cross_entropy": ("linear_cross_entropy", _cross_entropy(), "core"),
    "linear_cross_entropy_smooth": ("linear_cross_entropy", _cross_entropy(label_smoothing=0.1), ""),
}


def _rowwise_cases(shape: Mapping[str, int]) -> Iterator[Case]:
    extra = {"feed_forward": ("hidden",), "linear_cross_entropy": ("classes",)}
    for name, (op, build, tags) in ROWWISE.items():
        dims = ("rows", "d", *extra.get(op, ()))
        yield Case(name, op, {k: shape[k] for k in dims}, build, frozenset(tags.split()))


def cases(op: str | None = None, size: str = "small", tags: set[str] | None = None) -> list[Case]:
    """All cases of one size, or those of one op, or those that carry all of `tags`."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {sorted(SIZES)}, got {size!r}")
    everything = [*_attention_cases(SIZES[size]), *_rowwise_cases(SIZES[size])]
    if op is not None and op not in ARGUMENTS:
        raise ValueError(f"op must be one of {sorted(ARGUMENTS)}, got {op!r}")
    return [c for c in everything if (op is None or c.op == op) and (not tags or tags <= c.tags)]


def case(name: str, size: str = "small") -> Case:
    """The case of that name."""
    found = {c.name: c for c in cases(size=size)}
    if name not in found:
        raise ValueError(f"case must be one of {sorted(found)}, got {name!r}")
    return found[name]
