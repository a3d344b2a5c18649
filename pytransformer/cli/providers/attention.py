# SPDX-License-Identifier: Apache-2.0
"""Peers of `attention` and `attention_varlen`: the formula, and PyTorch's op.

PyTorch's op has its backend pinned. Neither supports packed sequences, so both run them one after
the other, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytransformer.cli.providers import (
    NAIVE,
    TORCH,
    Outputs,
    Prepared,
    Problem,
    Provider,
    Row,
    Unsupported,
    compiled,
    installed,
    prepare_ours,
)
from pytransformer.cli.providers.flex import FLEX
from pytransformer.testing.patterns import PATTERNS

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Terms"], torch.Tensor]


@dataclass(frozen=True)
class Terms:
    """Masks and biases of a program without our op; each call recomputes `additive()`."""

    visible: torch.Tensor | None  # bool, broadcastable to (B, Hq, Lq, Lk); None: all visible
    triangle: bool  # exactly the top-left causal mask
    blind_rows: bool  # some row has no visible key
    additive: Callable[[], torch.Tensor | None]
    scale: float
    softcap: float
    dropout_p: float
    sinks: torch.Tensor | None = None


def _terms(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keywords: dict[str, Any]
) -> Terms:
    from pytransformer.ops._core.registry import OPS
    from pytransformer.ops.masks import buckets_of
    from pytransformer.reference._attention import indices, visible_pairs

    with torch.no_grad():
        a = OPS["attention"].prepare(query, key, value, **keywords)[0]
        visible = visible_pairs(a)
        i, j, offset = indices(a)
        relative = j - i - offset
        triangle = torch.equal(visible, (j <= i).expand_as(visible))
        distance = relative.abs().to(query.dtype)
        buckets = (
            None
            if a.table is None
            else buckets_of(relative, a.table.shape[0], a.bidirectional, a.max_distance)
        )
        blind = not bool(visible.any(-1).all())

    def additive() -> torch.Tensor | None:
        terms = [
            t.to(query.dtype) for t in (a.mask, a.bias) if t is not None and t.dtype != torch.bool
        ]
        if a.slopes is not None:
            terms.append(-a.slopes.to(query.dtype)[:, None, None] * distance)
        if buckets is not None:
            bias = F.embedding(buckets, a.table.to(query.dtype))  # (..., Lq, Lk, Hq)
            terms.append(bias.movedim(-1, 0) if bias.dim() == 3 else bias.squeeze(1).movedim(-1, 1))
        return sum(terms[1:], terms[0]) if terms else None

    return Terms(
        _smallest(visible), triangle, blind, additive, a.scale, a.softcap, a.dropout_p, a.sinks
    )


def _smallest(visible: torch.Tensor) -> torch.Tensor | None:
    """Return the mask without broadcast dimensions; None if it hides nothing."""
    if visible.all():
        return None
    for dim in range(3):
        first = visible.narrow(dim, 0, 1)
        if torch.equal(visible, first.expand_as(visible)):
            visible = first
    return visible.contiguous()


def _naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    score = query @ key.transpose(-2, -1) * terms.scale
    if terms.softcap:
        score = terms.softcap * torch.tanh(score / terms.softcap)
    bias = terms.additive()
    if bias is not None:
        score = score + bias
    if terms.visible is not None:
        score = score.masked_fill(~terms.visible, -math.inf)
    if terms.sinks is not None:
        score = torch.cat(
            [score, terms.sinks.to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)], -1
        )
    weight = torch.softmax(score, dim=-1)
    if terms.sinks is not None:
        weight = weight[..., :-1]
    if terms.blind_rows and terms.visible is not None:
        weight = weight.masked_fill(~terms.visible.any(-1, keepdim=True), 0.0)
    if terms.dropout_p:
        weight = F.dropout(weight, terms.dropout_p)
    return weight @ value


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
) -> torch.Tensor:
    if terms.sinks is not None:
        raise Unsupported("scaled_dot_product_attention has no sinks")
    mask = None if terms.triangle else terms.visible
    bias = terms.additive()
    if bias is not None:
        mask = bias if terms.visible is None else bias.masked_fill(~terms.visible, -math.inf)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=terms.dropout_p,
        is_causal=terms.triangle and bias is None,
        scale=terms.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _forward(problem: Problem, kernel: Kernel) -> tuple[Callable[[], Outputs], float]:
    """Return the forward of a padded or packed problem through `kernel`, and its max softcap."""
    named = dict(problem.named)
    query, key, value = (named.pop(name) for name in ("query", "key", "value"))
    if problem.case.op == "attention_varlen":
        return _forward_packed(query, key, value, named, kernel)
    if (table := named.pop("page_table", None)) is not None:

        def gathered(pool: torch.Tensor) -> torch.Tensor:
            return pool[table].transpose(1, 2).flatten(2, 3)

        of_pages = _terms(query, gathered(key), gathered(value), named)
        return (
            lambda: (kernel(query, gathered(key), gathered(value), of_pages),)
        ), of_pages.softcap
    terms = _terms(query, key, value, named)
    return (lambda: (kernel(query, key, value, terms),)), terms.softcap


def _forward_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    named: dict[str, Any],
    kernel: Kernel,
) -> tuple[Callable[[], Outputs], float]:
    """Return a forward that runs one sequence after the other and gathers each one's pages."""
    spans, cu_k = list(pairwise(named.pop("cu_seqlens_q").tolist())), named.pop("cu_seqlens_k")
    del named["max_seqlen_q"], named["max_seqlen_k"]
    table, lengths = (named.pop(name, None) for name in ("page_table", "key_lengths"))
    spans_k = list(pairwise(cu_k.tolist())) if table is None else [(0, n) for n in lengths.tolist()]

    def sequence(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return rows[start:end].transpose(0, 1)[None]

    def keys(rows: torch.Tensor, b: int) -> torch.Tensor:
        start, end = spans_k[b]
        if table is None:
            return sequence(rows, start, end)
        pages = rows[table[b, : -(-end // rows.shape[2])]]  # (pages, Hkv, page size, D)
        return pages.transpose(0, 1).flatten(1, 2)[None, :, :end]

    def inputs(b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return sequence(query, *spans[b]), keys(key, b), keys(value, b)

    terms_of = {b: _terms(*inputs(b), named) for b, (i, j) in enumerate(spans) if j > i}

    def forward() -> Outputs:
        parts = [kernel(*inputs(b), terms)[0].transpose(0, 1) for b, terms in terms_of.items()]
        return (torch.cat(parts),)

    return forward, max((terms.softcap for terms in terms_of.values()), default=0.0)


def prepare_naive(problem: Problem) -> Prepared:
    forward, _ = _forward(problem, _naive)
    return Prepared(
        "softmax(q k^T) v, in the inputs' dtype", forward, own_dropout=problem.dropout > 0
    )


# PyTorch's order of preference; the first that supports the problem is pinned.
_SDP_BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "cuda": (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ),
}


def prepare_torch(problem: Problem) -> Prepared:
    return _prepare_sdpa(problem, _SDP_BACKENDS[problem.device])


def _prepare_sdpa(problem: Problem, backends: Sequence[SDPBackend]) -> Prepared:
    """Prepare PyTorch's op, pinned to the first of `backends` that supports the problem."""
    forward, softcap = _forward(problem, _sdpa)
    if softcap:
        raise Unsupported("scaled_dot_product_attention has no softcap")
    for backend in backends:
        if _computes(problem, forward, backend):
            name = backend.name.removesuffix("_ATTENTION").lower()
            return Prepared(
                f"scaled_dot_product_attention [{name}]",
                forward,
                partial(_pinned, backend),
                own_dropout=problem.dropout > 0,
            )
    which = (
        "no backend of scaled_dot_product_attention"
        if len(backends) > 1
        else f"{backends[0].name.lower()}: it does not"
    )
    raise Unsupported(
        f"{which} computes this" if len(backends) > 1 else f"{which} compute this here"
    )


def _prepare_pinned(backend: SDPBackend, problem: Problem) -> Prepared:
    if backend not in _SDP_BACKENDS[problem.device]:
        raise Unsupported(f"{backend.name.lower()} does not run on {problem.device}")
    return _prepare_sdpa(problem, (backend,))


def _flash_arguments(problem: Problem, package: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the tensors (B, L, H, D) and the keywords that flash-attn and flash-attn-4 share.

    Keywords of ours that remain have our names.
    """
    named = dict(problem.named)
    tensors = [named.pop(name).transpose(1, 2) for name in ("query", "key", "value")]
    causal, window = named.pop("causal", None), named.pop("window", None)
    if problem.case.op != "attention" or problem.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"{package} is compared on padded float16 and bfloat16 problems only")
    if causal == "top_left" and tensors[0].shape[1] != tensors[1].shape[1]:
        raise Unsupported(f"{package} aligns causality to the last key, not to the first")
    settings = {
        "softmax_scale": named.pop("scale", None),
        "softcap": named.pop("softcap", None) or 0.0,
        "causal": causal is not None,
    }
    if window is not None:
        settings["window_size"] = window
    return tensors, settings | {name: value for name, value in named.items() if value is not None}


def _refuse_ours(settings: dict[str, Any], package: str) -> None:
    """Raise Unsupported if keywords of ours remain in `settings`."""
    theirs = ("softmax_scale", "softcap", "causal", "window_size", "dropout_p", "learnable_sink")
    if left := [name for name in settings if name not in theirs]:
        raise Unsupported(f"{package} has no {', '.join(left)}")


def prepare_flash_attn(problem: Problem) -> Prepared:
    """Prepare the flash-attn package.

    It supports causal masks (bottom right), windows and ALiBi, in half precision on a GPU.
    """
    if problem.device != "cuda":
        raise Unsupported("flash-attn runs on CUDA GPUs only")
    flash_attn = installed("flash-attn", "flash_attn")
    tensors, settings = _flash_arguments(problem, "flash-attn")
    settings.pop("dropout_seed", None)
    if "window_size" in settings:
        settings["window_size"] = tuple(-1 if n is None else n for n in settings["window_size"])
    _refuse_ours(settings, "flash-attn")
    return Prepared(
        f"flash-attn {flash_attn.__version__}",
        lambda: (flash_attn.flash_attn_func(*tensors, **settings).transpose(1, 2),),
        own_dropout=problem.dropout > 0,
    )


def prepare_flash_attn_4(problem: Problem, deterministic: bool = False) -> Prepared:
    """Prepare FlashAttention-4, whose kernels for Hopper have a deterministic backward."""
    if problem.device != "cuda":
        raise Unsupported("flash-attn-4 runs on CUDA GPUs only")
    cute = installed("flash-attn-4", "flash_attn.cute")
    if problem.dropout:
        raise Unsupported("flash-attn-4 has no dropout")
    tensors, settings = _flash_arguments(problem, "flash-attn-4")
    if "sinks" in settings:
        settings["learnable_sink"] = settings.pop("sinks")
    _refuse_ours(settings, "flash-attn-4")

    def forward() -> Outputs:
        result = cute.flash_attn_func(*tensors, **settings, deterministic=deterministic)
        out = result[0] if isinstance(result, tuple) else result  # versions differ in lse
        return (out.transpose(1, 2),)

    return Prepared(f"flash_attn.cute, deterministic={deterministic}", forward)


def _pinned(backend: SDPBackend) -> AbstractContextManager[object]:
    return sdpa_kernel(backend)


def _computes(problem: Problem, forward: Callable[[], Outputs], backend: SDPBackend) -> bool:
    import warnings

    with warnings.catch_warnings():
        # PyTorch warns of each reason why a pinned backend cannot run
        warnings.simplefilter("ignore")
        try:
            with _pinned(backend):
                outputs = forward()
                if problem.grad:
                    torch.autograd.grad(
                        outputs,
                        list(problem.leaves.values()),
                        [torch.zeros_like(o) for o in outputs],
                    )
        except RuntimeError as error:
            if "No available kernel" in str(error) or "not implemented" in str(error):
                return False
            raise
    return True


_PINNED = tuple(
    Provider(f"torch_{name}", partial(_prepare_pinned, backend))
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("math", SDPBackend.MATH),
    )
)


def prepare_any_order(problem: Problem) -> Prepared:
    """Prepare "cuda" with deterministic=False, if that selects other backward kernels."""
    prepared = prepare_ours(
        "cuda", replace(problem, kwargs={**problem.kwargs, "deterministic": False})
    )
    return replace(prepared, label=f"{prepared.label}, deterministic=False")


PROVIDERS = dict.fromkeys(
    ("attention", "attention_varlen"),
    (
        Provider(NAIVE, prepare_naive),
        Provider(TORCH, prepare_torch),
        *_PINNED,
        compiled(prepare_naive),
        FLEX,
        Provider("flash_attn", prepare_flash_attn),
        Provider("flash_attn_4", prepare_flash_attn_4),
        Provider("flash_attn_4_in_order", partial(prepare_flash_attn_4, deterministic=True)),
        Provider("cuda_any_order", prepare_any_order),
    ),
)


def _square(length: int, head_dim: int, batch: int, heads: int) -> dict[str, int]:
    return {"B": batch, "Hq": heads, "Hkv": heads, "Lq": length, "Lk": length, "D": head_dim}


_FP32 = ("float32",)
_LONG = {"B": 1, "Hq": 2, "Lq": 1024, "Lk": 1024, "D": 64}
_SHORT = {"B": 2, "Hq": 4, "Lq": 256, "Lk": 256, "D": 64}
QUICK = (
    Row("full", _LONG),
    Row("causal", _LONG, _FP32),
    Row("key_padding", _SHORT, _FP32),
    Row("window", _LONG, _FP32),
    Row("t5_bias", _SHORT, _FP32),
    Row("bias", _SHORT, _FP32),
    Row("dropout", _SHORT, _FP32),
    Row("gqa", {**_SHORT, "Hq": 8, "Hkv": 2}, _FP32),
    Row("decode", {"B": 1, "Hq": 8, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 64}, _FP32),
    Row("varlen", _SHORT, _FP32),
)
_MASKED = (
    "key_padding",
    "window",
    "dropout",
    "bias",
    "t5_bias",
    "alibi",
    "segments",
    "bool_mask",
    "softcap",
)
_MASKS = _square(1024, 64, 2, 2)
_SUSTAINED = _square(2048, 64, 2, 4)  # for burst and sustained speed
_GRID = [
    _square(length, d, *size)
    for length in (512, 1024, 2048, 4096)
    for d in (64, 128)
    for size in ((1, 1), (2, 4))
]
SUITES = {
    "aims": (
        Row("full", _square(128, 64, 16, 8)),
        *(Row(name, _MASKS) for name in _MASKED),
        Row("gqa", {**_MASKS, "Hq": 8, "Hkv": 2}),
        Row("varlen", _square(512, 64, 4, 4)),
        Row(
            "decode",
            {"B": 1, "Hq": 32, "Hkv": 32, "Lq": 1, "Lk": 8192, "D": 128},
            modes=("fwd",),
            cold=True,
        ),
        *(
            Row(name, shape, sustained=2.0 if name == "full" and shape == _SUSTAINED else 0.0)
            for shape in _GRID
            for name in ("full", "causal")
        ),
    ),
    "patterns": tuple(
        Row(name, _square(1024 << n, 64, 1, 2)) for n in range(7) for name in PATTERNS
    ),
    "isa": (
        Row("full", _square(1024, 64, 2, 4)),
        Row("causal", _square(1024, 64, 2, 4)),
        Row("full", _square(1024, 128, 2, 4)),
    ),
}
