"""How near to float64 PyTorch's own attention kernels come, in units of the bound: where the constants come
from.

    python -m pytransformer.testing.calibrate --cases 1000 > table.md

Draws problems as the fuzzer does, with the keywords that torch.nn.functional.scaled_dot_product_attention
has, and prints for each of its CPU kernels, dtype and kind of data the 50th and 99th percentile and the
maximum of c (bounds.coefficients), as the table of docs/accuracy.md. "ours" are backends of this package on
the same problems.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import bounds
from .draw_attention import Problem, draw

KEYWORDS = frozenset({"attn_mask", "causal", "scale", "return_lse"})
KERNELS = {"PyTorch math": SDPBackend.MATH, "PyTorch flash": SDPBackend.FLASH_ATTENTION}
Table = dict[tuple[str, str, str, str], list[float]]


def problem(seed: int, case: int) -> Problem | None:
    """A problem that PyTorch's kernels can do, its tensors contiguous and its mask in the dtype of query;
    None if drawn otherwise."""
    p = draw(seed, case, KEYWORDS)
    if p.keywords.get("causal") == "bottom_right":
        p.keywords["causal"] = "top_left"
    if "attn_mask" in p.features:
        p.keywords.pop("causal", None)  # MATH refuses a mask together with is_causal
    p.tensors = {n: t.contiguous() for n, t in p.tensors.items()}
    if "attn_mask" in p.tensors:
        p.tensors["attn_mask"] = p.tensors["attn_mask"].to(p.dtype)
    if p.keywords.get("scale", 1.0) <= 0:
        del p.keywords["scale"]  # the flash kernel returns NaN for causal problems with such a scale
    p.keywords.pop("return_lse", None)
    p.grad_out, p.grad_lse = p.grad_out.contiguous(), None
    p.wanted = ("query", "key", "value")
    empty = 0 in p.tensors["query"].shape or 0 in p.tensors["key"].shape
    return None if empty else p


def pytorch(p: Problem, kernel: SDPBackend) -> dict[str, Tensor]:
    """Output and gradients of the problem from one of PyTorch's kernels."""
    leaves = {n: p.tensors[n].detach().requires_grad_() for n in p.wanted}
    mask = p.tensors.get("attn_mask", p.keywords.get("attn_mask"))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            attn_mask=mask,
            is_causal="causal" in p.keywords,
            scale=p.keywords.get("scale"),
            enable_gqa=p.tensors["query"].shape[1] != p.tensors["key"].shape[1],
        )
    grads = torch.autograd.grad(out, list(leaves.values()), p.grad_out)
    return {"out": out, **dict(zip(leaves, grads))}


def ours(p: Problem, backend: str) -> dict[str, Tensor]:
    """The same from a backend of this package."""
    import pytransformer as pt

    leaves = {n: p.tensors[n].detach().requires_grad_() for n in p.wanted}
    out = pt.attention(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        **p.public_keywords({k: t for k, t in p.tensors.items() if k not in leaves}),
        backend=backend,
        strict=True,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), p.grad_out)
    return {"out": out, **dict(zip(leaves, grads))}


def calibrate(seed: int, cases: int, backends: list[str]) -> Table:
    """c of every result, by (kernel, dtype, data, result)."""
    runs: dict[str, Callable[[Problem], dict[str, Tensor]]] = {
        **{name: functools.partial(pytorch, kernel=kernel) for name, kernel in KERNELS.items()},
        **{f"ours, {name}": functools.partial(ours, backend=name) for name in backends},
    }
    table: Table = defaultdict(list)
    for case in range(cases):
        p = problem(seed, case)
        if p is None:
            continue
        solution = p.solve()
        if solution.dead_queries.any():
            continue  # PyTorch's flash kernel is wrong there, not inaccurate
        for name, run in runs.items():
            try:
                results = run(p)
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "requires" not in str(error):
                    raise
                continue  # this kernel cannot do this problem
            for check in bounds.check(solution, results, p.dtype, p.limits):
                table[name, str(p.dtype)[6:], p.limits, check.name].append(check.reached)
    return table


def markdown(table: Table) -> str:
    """The table of docs/accuracy.md: p50 / p99 / max of c."""
    names = ("out", "query", "key", "value")
    lines = ["| kernel | dtype | data | problems | " + " | ".join(names) + " |", "|---" * (4 + len(names)) + "|"]
    for kernel, dtype, data in sorted({k[:3] for k in table}):
        cells = []
        for name in names:
            c = torch.tensor(table[kernel, dtype, data, name])
            cells.append(f"{c.median():.2f} / {c.quantile(0.99):.2f} / {c.max():.2f}")
        count = len(table[kernel, dtype, data, "out"])
        lines.append(f"| {kernel} | {dtype} | {data.replace('_', ' ')} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pytransformer.testing.calibrate", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--backend", action="append", default=[], help="also measure this backend of ours")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # SDPA tells of every problem that a kernel refuses
    started = time.monotonic()
    print(markdown(calibrate(options.seed, options.cases, options.backend)))
    print(
        f"{options.cases} problems, seed {options.seed}, torch {torch.__version__}, {time.monotonic() - started:.0f} s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
