"""How near to float64 PyTorch's own kernels come for the norms, feed_forward and linear_cross_entropy, in units of the bound:
where the constants come from.

    python -m pytransformer.testing.calibrate_ops --cases 1000 --backend cpu > table.md

Draws problems as the fuzzers do, without dropout and with contiguous tensors of one dtype, and prints for plain PyTorch code
(F.layer_norm, F.rms_norm; F.linear, activation, F.linear; F.linear, F.cross_entropy), each dtype and kind of data the 50th and 99th
percentile and the maximum of c (bounds.coefficients), as the tables of docs/accuracy.md. "ours" are backends of this package on
the same problems.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import bounds, fuzz_cross_entropy, fuzz_feed_forward, fuzz_layer_norm, oracle

Table = dict[tuple[str, str, str, str], list[float]]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
DRAW: dict[str, Callable[[int, int], Any]] = {
    "layer_norm": fuzz_layer_norm.draw,
    "feed_forward": fuzz_feed_forward.draw,
    "linear_cross_entropy": fuzz_cross_entropy.draw,
}
SOLVE: dict[str, Callable[[Any], dict[str, oracle.Result]]] = {
    "layer_norm": lambda p: fuzz_layer_norm.solve(p, None),
    "feed_forward": fuzz_feed_forward.solve,
    "linear_cross_entropy": fuzz_cross_entropy.solve,
}
NAMES = {
    "layer_norm": ("out", "x", "weight", "bias"),
    "feed_forward": ("out", "x", "w1", "w2", "b1", "b2", "gate_weight", "gate_bias"),
    "linear_cross_entropy": ("loss", "x", "weight", "bias"),
}


def problem(op: str, seed: int, case: int) -> Any:
    """A problem that plain PyTorch code can do; None if drawn otherwise."""
    p = DRAW[op](seed, case)
    if op == "layer_norm" and p.op == "add_norm":  # the norm of a sum as stored: nothing new
        return None
    for name in ("dropout_p", "dropout_seed", "recompute"):
        p.keywords.pop(name, None)
    p.tensors = {
        n: t.contiguous()
        if n == "target" or (n == "grad_out" and op == "linear_cross_entropy")
        else t.to(p.dtype).contiguous()
        for n, t in p.tensors.items()
    }
    return None if not p.wanted or p.tensors["x"].numel() == 0 or "ignored_nan" in p.features else p


def pytorch(op: str, p: Any, t: dict[str, Tensor]) -> Tensor:
    """Plain PyTorch code, in the dtype of the tensors."""
    keywords = p.keywords
    if op == "layer_norm":
        shape = t["x"].shape[t["x"].dim() - p.dims :]
        if p.op == "rms_norm":
            return F.rms_norm(t["x"], shape, t.get("weight"), **keywords)
        return F.layer_norm(t["x"], shape, t.get("weight"), t.get("bias"), **keywords)
    if op == "feed_forward":
        act = ACTIVATIONS[keywords["activation"]]
        hidden = F.linear(t["x"], t["w1"], t.get("b1"))
        hidden = act(F.linear(t["x"], t["gate_weight"], t.get("gate_bias"))) * hidden if "gate_weight" in t else act(hidden)
        return F.linear(hidden, t["w2"], t.get("b2"))
    logits = F.linear(t["x"], t["weight"], t.get("bias")).reshape(-1, t["weight"].shape[0])
    losses = F.cross_entropy(logits, t["target"].reshape(-1), **keywords)
    return losses.view(t["target"].shape) if keywords["reduction"] == "none" else losses


def ours(op: str, backend: str, p: Any, t: dict[str, Tensor]) -> Tensor:
    """The same from a backend of this package."""
    import pytransformer as pt

    if op == "layer_norm":
        return fuzz_layer_norm.call(p, t, backend)["out"]
    keywords = p.keywords
    if op == "feed_forward":
        return pt.feed_forward(
            t["x"], t["w1"], t.get("b1"), t["w2"], t.get("b2"), gate_weight=t.get("gate_weight"), gate_bias=t.get("gate_bias"),
            **keywords, backend=backend, strict=True,
        )  # fmt: skip
    return pt.linear_cross_entropy(
        t["x"], t["weight"], t["target"], bias=t.get("bias"), **keywords, backend=backend, strict=True
    )


def calibrate(op: str, seed: int, cases: int, backends: list[str]) -> Table:
    """c of every result, by (kernel, dtype, data, result)."""
    runs: dict[str, Callable[..., Tensor]] = {"PyTorch": lambda p, t: pytorch(op, p, t)}
    runs |= {f"ours, {name}": lambda p, t, name=name: ours(op, name, p, t) for name in backends}
    table: Table = defaultdict(list)
    for case in range(cases):
        p = problem(op, seed, case)
        if p is None:
            continue
        solution = oracle.Solution(SOLVE[op](p), 1, torch.empty(0), torch.empty(0))
        first = NAMES[op][0]
        if solution.results[first].value.isnan().any():
            continue  # the mean over no target
        data = "zero_mean" if p.data == "zero_mean" else "any"
        for name, run in runs.items():
            leaves = {
                n: t.detach().requires_grad_() if t.is_floating_point() else t for n, t in p.tensors.items() if n != "grad_out"
            }
            out = run(p, leaves)
            grads = torch.autograd.grad(out, [leaves[n] for n in p.wanted], p.tensors["grad_out"].to(out.dtype))
            # PyTorch's loss has the dtype of its logits, and is judged in its eps
            stored = solution.results[first]
            judged = {first: out.to(stored.dtype), **dict(zip(p.wanted, grads))}
            for check in bounds.check(solution, judged, p.dtype, data, p.op if op == "layer_norm" else op):
                table[name, str(p.dtype)[6:], data, check.name].append(check.reached)
    return table


def markdown(op: str, table: Table) -> str:
    """p50 / p99 / max of c."""
    names = NAMES[op]
    lines = [f"| {op} | dtype | data | problems | " + " | ".join(names) + " |", "|---" * (4 + len(names)) + "|"]
    for kernel, dtype, data in sorted({k[:3] for k in table}):
        cells = []
        for name in names:
            c = torch.tensor(table.get((kernel, dtype, data, name)) or [torch.nan])
            cells.append("–" if c.isnan().all() else f"{c.median():.2f} / {c.quantile(0.99):.2f} / {c.max():.2f}")
        count = len(table[kernel, dtype, data, names[0]])
        lines.append(f"| {kernel} | {dtype} | {data.replace('_', ' ')} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pytransformer.testing.calibrate_ops", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--backend", action="append", default=[], help="also measure this backend of ours")
    parser.add_argument("--op", action="append", default=[], choices=list(NAMES), help="only this op")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for op in options.op or NAMES:
        started = time.monotonic()
        print(markdown(op, calibrate(op, options.seed, options.cases, options.backend)), end="\n\n")
        seconds = time.monotonic() - started
        print(
            f"{op}: {options.cases} problems, seed {options.seed}, torch {torch.__version__}, {seconds:.0f} s", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
