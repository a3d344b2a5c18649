# SPDX-License-Identifier: Apache-2.0
"""Random problems of layer_norm, rms_norm and add_norm against float64, for `fuzz`.

The bound, with xhat = (h - mean) rstd, g = dy weight and r = eps(float32) / eps(dtype). A float32
mean shifts a row's xhat by up to m = rstd mean|h| float32 units, which such a kernel cannot avoid.
The variance about the mean is insensitive to that shift, so E[h^2] - E[h]^2 violates the bound on
offset data.

    y        |weight xhat| + |bias| + r |weight| m
    dh       rstd (|g| + mean|g| + |xhat| mean|g xhat|
             + r m (mean|g xhat| + |xhat| mean|g|)) + |d residual_out|
    dweight  sum over rows of |dy| (|xhat| + r m)
    dbias    sum over rows of |dy|

The exact norm is computed from our stored residual_out, which is compared with residual +
dropout(x) separately.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle
from .case import Case, named
from .guarded import place, random_layout
from .judge import data_of, exact
from .judge import judge as judge_run
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("layer_norm", "rms_norm", "add_norm")
TAG = 0x80000001
LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    torch.float32: {"zero_mean": (2.0, 4.0), "any": (4.0, 8.0)},
}


@dataclass
class Problem:
    """One call, its upstream gradients, and its features."""

    op: str
    dtype: torch.dtype
    dims: int
    data: str
    tensors: dict[str, Tensor]  # x, residual, weight, bias; grad_out, grad_residual_out
    layouts: dict[str, str]
    keywords: dict[str, Any]
    wanted: list[str]
    features: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{n} {str(t.dtype)[6:]} {tuple(t.shape)} {self.layouts[n]}"
            for n, t in self.tensors.items()
        )
        return (
            f"{self.op} over {self.dims} dims, {self.data} data, {self.keywords}, gradients of"
            f" {self.wanted}: {shapes}"
        )

    @property
    def rms(self) -> bool:
        return self.op == "rms_norm" or self.keywords.get("kind") == "rms"

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.tensors["residual"].dtype if "residual" in self.tensors else self.dtype


def _values(rng: random.Random, data: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    if data == "positive":
        x = x.abs()
    elif data == "offset":
        x = 100 + 0.1 * x if dtype in (torch.float32, torch.float64) else 2 + 0.1 * x
    elif data == "heavy":
        x = x * x.abs() ** 3
    elif data == "tiny":
        x = x * 1e-4
    return x.to(dtype)


def draw(seed: int, case: int) -> Problem:
    """Return the problem of this seed and number."""
    rng = random.Random(f"norm {seed} {case}")
    torch.manual_seed(rng.getrandbits(40))
    op, dtype = rng.choice(KINDS), rng.choice(DTYPES)
    dims = rng.choice((1, 1, 1, 2, 3))
    columns = rng.choice(
        (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96, 100, 127, 130, 257, 768, 1025)
    )
    inner = {
        1: (columns,),
        2: (rng.choice((1, 3, 5)), columns),
        3: (2, rng.choice((1, 3)), columns),
    }[dims]
    lead = tuple(rng.choice((1, 2, 3, 5, 9)) for _ in range(rng.choice((0, 1, 2, 2, 3))))
    if rng.random() < 0.04:
        lead = (0, *lead)
    if rng.random() < 0.05:
        lead = (rng.choice((130, 300)),)
    data = rng.choice(("zero_mean", "zero_mean", "positive", "offset", "heavy", "tiny"))
    shape = (*lead, *inner)
    low = (torch.float32, torch.bfloat16, torch.float16)

    def other(chance: float) -> torch.dtype:
        return rng.choice(low) if dtype != torch.float64 and rng.random() < chance else dtype

    tensors = {"x": _values(rng, data, shape, dtype)}
    keywords: dict[str, Any] = {}
    if op == "add_norm":
        if rng.random() < 0.85:
            tensors["residual"] = _values(rng, data, shape, other(0.4))
        if rng.random() < 0.4:
            keywords |= {
                "dropout_p": rng.choice((0.1, 0.5, 0.9, 1.0)),
                "dropout_seed": rng.getrandbits(63),
            }
        keywords["kind"] = rng.choice(("layer", "rms"))
    if (op == "add_norm" and dims > 1) or rng.random() < 0.75:
        tensors["weight"] = torch.randn(inner, dtype=torch.float64).add(1).to(other(0.3))
    if op != "rms_norm" and rng.random() < 0.7:
        tensors["bias"] = torch.randn(inner, dtype=torch.float64).to(other(0.3))
    if rng.random() < 0.5:
        keywords["eps"] = rng.choice((1e-5, 1e-6, 1e-3, 1e-12))
    wanted = [n for n in tensors if rng.random() < 0.8]
    if wanted and (op != "add_norm" or rng.random() < 0.9):
        tensors["grad_out"] = torch.randn(shape, dtype=torch.float64).to(dtype)
    if wanted and op == "add_norm" and (rng.random() < 0.6 or "grad_out" not in tensors):
        tensors["grad_residual_out"] = torch.randn(shape, dtype=torch.float64).to(
            tensors.get("residual", tensors["x"]).dtype
        )
    layouts = {n: random_layout(rng, t, 0.5) for n, t in tensors.items()}
    if "grad_out" in tensors and rng.random() < 0.1:
        layouts["grad_out"] = "expanded"
        tensors["grad_out"] = tensors["grad_out"][tuple(slice(0, 1) for _ in shape)].expand(shape)
    features = {
        *tensors,
        *keywords,
        data,
        f"{dims}d",
        op,
        *(n for n, v in layouts.items() if v != "contiguous" and n == "x"),
    }
    if any(tensors[n].dtype != dtype for n in ("residual", "weight", "bias") if n in tensors):
        features.add("mixed")
    return Problem(op, dtype, dims, data, tensors, layouts, keywords, wanted, features)


def of_case(case: Case, dtype: torch.dtype) -> Problem:
    """Return a shared case as a problem with all gradients, for every output."""
    args, keywords = case.make("cpu", dtype, seed=0)
    given = named(case.op, args, keywords)
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    keywords = {n: v for n, v in given.items() if n not in tensors and n != "normalized_shape"}
    wanted = list(tensors)
    for grad in ("grad_out", "grad_residual_out")[: 1 + (case.op == "add_norm")]:
        tensors[grad] = torch.randn(tensors["x"].shape, dtype=torch.float64).to(dtype)
    layouts = dict.fromkeys(tensors, "contiguous")
    return Problem(case.op, dtype, 1, "zero_mean", tensors, layouts, keywords, wanted)


# ---- the exact solution


def keep_factor(problem: Problem) -> Tensor | float:
    """Return 0 at dropped elements, else the scale, in x's shape; uses the oracle's Philox."""
    p = problem.keywords.get("dropout_p", 0.0)
    threshold = round(65536 * p)
    if threshold in (0, 65536):
        return 0.0 if threshold else 1.0
    shape = problem.tensors["x"].shape
    split = len(shape) - problem.dims
    return column_keep(
        problem.keywords["dropout_seed"],
        threshold,
        math.prod(shape[:split]),
        math.prod(shape[split:]),
        TAG,
    ).view(shape)


def column_keep(seed: int, threshold: int, rows: int, columns: int, tag: int) -> Tensor:
    """Return (rows, columns) float64: 0 or 65536 / (65536 - threshold)."""
    c = torch.arange(columns)
    group, slot = 4 * (c // 32) + (c % 8) // 2, 2 * ((c % 32) // 8) + c % 2
    row = torch.arange(rows)[:, None]
    counter = (group[None], row & 0xFFFFFFFF, row >> 32, torch.tensor(tag))
    words = oracle.philox(tuple(torch.broadcast_tensors(*counter)), seed)
    draws = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)])
    kept = draws.gather(0, slot[None, None].expand(1, rows, columns))[0] >= threshold
    return kept.double() * (65536.0 / (65536 - threshold))


def solve(problem: Problem, stored: Tensor | None) -> dict[str, oracle.Result]:
    """Return every result in float64 with its S; `stored` is our residual_out, the norm's input."""
    t = {n: v.double() for n, v in problem.tensors.items()}
    factor = keep_factor(problem)
    coarse = max(problem.dtype, problem.stream_dtype, key=lambda d: torch.finfo(d).eps)
    work = torch.float64 if problem.dtype == torch.float64 else torch.float32
    ratio = torch.finfo(work).eps / torch.finfo(coarse).eps
    out: dict[str, oracle.Result] = {}

    def put(name: str, value: Tensor, size: Tensor, gradient: bool, dtype: torch.dtype) -> None:
        # fp16's min subnormal is a rounding step in itself.
        floor = torch.full_like(size, 2.0**-24 if dtype == torch.float16 else 0.0)
        out[name] = oracle.Result(value, size, floor, gradient, dtype)

    h = t["x"]
    if problem.op == "add_norm":
        branch = torch.where(torch.as_tensor(factor) == 0, 0.0, t["x"] * factor)
        residual = t.get("residual", torch.zeros(()))
        put(
            "residual_out",
            branch + residual,
            branch.abs() + residual.abs() + 0 * branch,
            False,
            problem.stream_dtype,
        )
        h = out["residual_out"].value if stored is None else stored.detach().double()
    over = tuple(range(-problem.dims, 0))
    eps = problem.keywords.get("eps")
    if eps is None:
        eps = torch.finfo(problem.stream_dtype).eps if problem.op == "rms_norm" else 1e-5
    mean = torch.zeros(()) if problem.rms else h.mean(over, keepdim=True)
    rstd = ((h - mean).square().mean(over, keepdim=True) + eps).rsqrt()
    xhat = (h - mean) * rstd
    m = 0.0 if problem.rms else rstd * h.abs().mean(over, keepdim=True)
    weight, bias = t.get("weight", torch.ones(())), t.get("bias", torch.zeros(()))
    name = "normed" if problem.op == "add_norm" else "out"
    put(
        name,
        xhat * weight + bias,
        (xhat * weight).abs() + bias.abs() + ratio * weight.abs() * m,
        False,
        problem.dtype,
    )

    dy = t.get("grad_out", torch.zeros_like(h))
    stream = t.get("grad_residual_out", torch.zeros_like(h))
    g = dy * weight
    gx = (g * xhat).mean(over, keepdim=True)
    gm = torch.zeros(()) if problem.rms else g.mean(over, keepdim=True)
    gx_size, gm_size = (g * xhat).abs().mean(over, keepdim=True), g.abs().mean(over, keepdim=True)
    dh = rstd * (g - gm - xhat * gx) + stream
    size = g.abs() + xhat.abs() * gx_size + ratio * m * (gx_size + xhat.abs() * gm_size)
    size = rstd * (size if problem.rms else size + gm_size) + stream.abs()
    put("residual", dh, size, True, problem.stream_dtype)
    dropped = torch.as_tensor(factor) == 0
    put(
        "x",
        torch.where(dropped, 0.0, dh * factor),
        torch.where(dropped, 0.0, size * factor),
        True,
        problem.dtype,
    )
    lead = tuple(range(h.dim() - problem.dims))

    def over_rows(v: Tensor) -> Tensor:
        return v.sum(lead) if lead else v

    if "weight" in t:
        put(
            "weight",
            over_rows(dy * xhat),
            over_rows(dy.abs() * (xhat.abs() + ratio * m)),
            True,
            problem.tensors["weight"].dtype,
        )
    if "bias" in t:
        put("bias", over_rows(dy), over_rows(dy.abs()), True, problem.tensors["bias"].dtype)
    return out


# ---- one problem on one backend


def call(problem: Problem, leaves: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Return the outputs of the public function, by name."""
    import pytransformer as pt

    keywords = problem.keywords | {"backend": backend, "strict": True}
    weight, bias = leaves.get("weight"), leaves.get("bias")
    if problem.op == "add_norm":
        normed, residual_out = pt.add_norm(
            leaves["x"], leaves.get("residual"), weight, bias, **keywords
        )
        return {"normed": normed, "residual_out": residual_out}
    shape = leaves["x"].shape[leaves["x"].dim() - problem.dims :]
    if problem.op == "rms_norm":
        return {"out": pt.rms_norm(leaves["x"], shape, weight, **keywords)}
    return {"out": pt.layer_norm(leaves["x"], shape, weight, bias, **keywords)}


def run(
    problem: Problem, backend: str, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor | None], list[tuple[str, str]]]:
    """Return (results by name on the CPU, raw ops run), with guarded and poisoned memory."""
    from pytransformer.ops._core.registry import trace

    laid = {
        n: (
            t.to(device)
            if problem.layouts[n] == "expanded"
            else place(t.to(device), problem.layouts[n])
        )
        for n, t in problem.tensors.items()
    }
    leaves = {
        n: t.requires_grad_(n in problem.wanted)
        for n, t in laid.items()
        if not n.startswith("grad_")
    }
    with poisoned(), trace() as record:
        results: dict[str, Tensor | None] = dict(call(problem, leaves, backend))
        asked = [
            (results[n], laid[g])
            for n, g in zip(results, ("grad_out", "grad_residual_out"))
            if g in laid
        ]
        asked = [(out, grad) for out, grad in asked if out is not None and out.requires_grad]
        if asked:
            outputs, grads = zip(*asked)
            found = torch.autograd.grad(
                outputs, [leaves[n] for n in problem.wanted], grads, allow_unused=True
            )
            results |= dict(zip(problem.wanted, found))
    return {n: None if r is None else r.cpu() for n, r in results.items()}, list(record)


def judge(
    problem: Problem, backend: str, repeat: bool, device: str | torch.device = "cpu"
) -> tuple[list[bounds.Check], list[str]]:
    """Check one backend on the problem; `repeat` runs it twice and compares bits."""
    coarse = max(problem.dtype, problem.stream_dtype, key=lambda d: torch.finfo(d).eps)
    return judge_run(
        lambda: run(problem, backend, device),
        lambda results: exact(solve(problem, results.get("residual_out"))), backend, repeat,
        dtype=coarse, data=data_of(problem), limits=LIMITS,
    )  # fmt: skip


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem and check every backend on it; `repeat` compares bits of two runs."""
    problem = draw(seed, case)
    return problem, {backend: judge(problem, backend, repeat) for backend in backends}
