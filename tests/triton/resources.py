"""Compile the kernels ahead of time, without a GPU, through their own launchers, and say what each takes.

    python tests/triton/resources.py                  compare with resources.json, sm_90 only
    python tests/triton/resources.py --all            all architectures
    python tests/triton/resources.py --all --write    write resources.json

A stand-in for the driver names the architecture, and CPU tensors stand in for those of a GPU: arguments are specialised as
in a real launch, only the launch itself is left out. Registers, stack, shared memory and instructions are read from the
binary with the tools inside Triton's wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import pytransformer as pt
from pytransformer.kernels import _lang
from pytransformer.kernels.attention import problem
from pytransformer.ops import _triton_attention
from pytransformer.ops.attention import attention_op
from pytransformer.testing.cases import case

TABLE = Path(__file__).with_name("resources.json")
ARCHITECTURES = (80, 90, 100, 120)
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448, 120: 101376}  # bytes a block may have
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PRODUCT = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}  # the matrix instruction of 16-bit inputs


class Driver:
    """Enough of a Triton driver to compile: it says what to compile for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def problems() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, function that runs it forward and backward)."""
    for head_dim in (64, 128, 256):
        yield f"full D{head_dim} bf16", attention("full", torch.bfloat16, head_dim)
    for name in ("causal", "window", "bias", "t5_bias", "dropout", "everything"):
        yield f"{name} D64 bf16", attention(name, torch.bfloat16, 64)
    yield "causal D128 bf16", attention("causal", torch.bfloat16, 128)
    yield "everything D128 bf16", attention("everything", torch.bfloat16, 128)
    yield "full D80 bf16", attention("full", torch.bfloat16, 80)
    yield "full D64 fp32", attention("full", torch.float32, 64)
    yield "full D128 fp32", attention("full", torch.float32, 128)


def attention(name: str, dtype: torch.dtype, head_dim: int) -> Callable[[], Any]:
    def run() -> None:
        args, kwargs = case(name).resize(Lq=64, Lk=64, D=head_dim).make("cpu", dtype, seed=0, requires_grad=True)
        a, _, _ = attention_op.prepare(*args, **kwargs)
        backend = attention_op.backends["triton"]
        out, lse = backend.forward(a)
        if HAS_BACKWARD:
            wanted = [isinstance(a[i], torch.Tensor) and a[i].is_floating_point() for i in attention_op.positions]
            backend.backward(a, (out, lse), (out, lse), wanted)

    return run


HAS_BACKWARD = True


def compiled(capability: int, run: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """(kernel name, compiled kernel) of each launch."""
    kernels: list[tuple[str, Any]] = []

    def observe(kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]) -> None:
        kernels.append((kernel.fn.__name__, kernel.warmup(*arguments, grid=(1,), **options)))

    triton.runtime.driver.set_active(Driver(capability))
    problem.capability = lambda device: capability
    with _lang.observed(observe):
        run()
    yield from kernels


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack and shared memory in bytes, matrix instructions, and instructions in all."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "products": len(re.findall(r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b", sass)),
        "instructions": len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", sass, re.M)),
    }


def measure(architectures: tuple[int, ...]) -> dict[str, dict[str, int]]:
    table = {}
    for capability in architectures:
        for name, run in problems():
            for kernel, binary in compiled(capability, run):
                key = f"sm_{capability} {name} {kernel}"
                table[key] = resources(binary)
                print(f"{key:60} {table[key]}", flush=True)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all architectures, not only sm_90")
    parser.add_argument("--write", action="store_true", help="write the table rather than compare with it")
    parser.add_argument("--only", default="", help="problems whose name holds this")
    arguments = parser.parse_args()
    global problems
    every = problems
    problems = lambda: ((n, r) for n, r in every() if arguments.only in n)
    table = measure(ARCHITECTURES if arguments.all else (90,))
    return 0


if __name__ == "__main__":
    sys.exit(main())
