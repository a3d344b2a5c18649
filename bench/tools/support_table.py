# SPDX-License-Identifier: Apache-2.0
"""Write the backend support table of docs/fallbacks.md from the op registry.

    python bench/tools/support_table.py           # print it
    python bench/tools/support_table.py --write   # write it between the page's markers

A cell lists the dtypes that the backend supports for these cases, from the `why_not` of every call.
Cases of an op with equal cells share a line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core.registry import OPS
from pytransformer.testing.cases import APART, FORWARD_ONLY, cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fallbacks.md"
START, END = (
    "<!-- support table: start, written by bench/tools/support_table.py -->",
    "<!-- support table: end -->",
)
DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
DEVICE = {"reference": "cpu", "torch": "cpu", "cpu": "cpu", "triton": "cuda", "cuda": "cuda"}


# GPU backends query the compute capability. The table is for Hopper and must not need a GPU.
torch.cuda.get_device_capability = lambda device=None: (9, 0)
# Assume a CUDA library built for Hopper, which a machine without nvcc lacks.
cuda_library.why_not_loaded = lambda op: None
cuda_library._why_not_device = lambda index: None
cuda_library.runs_sm90a = lambda device: True
cuda_library.ask = lambda op, *given: sys.maxsize  # a limit that no case reaches


def supported(backend: str, case) -> str:
    """Return the dtypes that the backend supports for the case, on its device."""
    op = OPS[case.op]
    if backend not in op.backends:
        return "–"
    found = []
    for dtype, name in DTYPES.items():
        args, kwargs = case.make("cpu", dtype, seed=0, requires_grad=True)
        a, _, _ = op.prepare(*args, **kwargs)
        if DEVICE[backend] == "cpu":
            found += [name] * (op.backends[backend].why_not(a) is None)
            continue
        # Fake tensors give a GPU backend's answer without a GPU.
        meta = {n: t.to("meta") for n, t in a._asdict().items() if isinstance(t, torch.Tensor)}
        with FakeTensorMode() as fake:
            device = torch.device(DEVICE[backend])
            a = a._replace(**{n: FakeTensor(fake, t, device) for n, t in meta.items()})
            if op.backends[backend].why_not(a) is None:
                found.append(name)
    return "all" if len(found) == len(DTYPES) else ", ".join(found) or "no"


def table() -> str:
    backends = [b for b in DEVICE if any(b in op.backends for op in OPS.values())]
    lines: dict[tuple[str, ...], list[str]] = {}
    every = [*cases(size="small"), *cases(size="small", tags={APART, FORWARD_ONLY})]
    for case in sorted(every, key=lambda case: [*OPS, case.op].index(case.op)):
        if case.op in OPS:
            answers = (case.op, *(supported(b, case) for b in backends))
            lines.setdefault(answers, []).append(case.name.replace("_", " "))
    rows = [
        f"| {op} | {', '.join(names)} | {' | '.join(cells)} |"
        for (op, *cells), names in lines.items()
    ]
    return "\n".join(
        ["| op | cases | " + " | ".join(backends) + " |", "|---" * (2 + len(backends)) + "|", *rows]
    )


def written(page: str) -> str:
    """Return the page with a new table between its markers."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/fallbacks.md instead of printing"
    )
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
