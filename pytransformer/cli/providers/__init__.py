# SPDX-License-Identifier: Apache-2.0
"""The implementations of an op in a benchmark: our backends and their peers.

The peers are naive code, PyTorch's op and, on request, others. A `Provider` prepares one problem:
it returns a description and the forward as a function without arguments, or raises `Unsupported`
with the reason. Data that a program would store between calls (a mask from lengths, the integer
buckets of a relative bias) is built during preparation, outside the clock, which favors the peers.
Work that a training step repeats (gathering a bias from its table) is timed.

The file of a family, loaded by name, may have `PROVIDERS`, the peers of each op; `QUICK`, the rows
of `bench --quick`; and `SUITES`, the rows of each suite.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from pytransformer.ops._core.registry import OPS
from pytransformer.testing.case import Case, leaves, named

NAIVE, TORCH = "naive", "torch"
# Variants of our backends.
VARIANTS = {"cuda_any_order": "the backend cuda with deterministic=False"}
# Only --providers enables these: they take long to prepare or repeat what "torch" shows.
ON_REQUEST = {
    "torch_flash": "scaled_dot_product_attention, flash kernel",
    "torch_efficient": "scaled_dot_product_attention, memory-efficient kernel",
    "torch_cudnn": "scaled_dot_product_attention, cuDNN",
    "torch_math": "scaled_dot_product_attention, plain mathematics",
    "compile": "torch.compile of the naive code",
    "flex": "compiled FlexAttention",
    "flash_attn": "the flash-attn package",
    "flash_attn_4": "FlashAttention-4 (flash_attn.cute)",
    "flash_attn_4_in_order": "FlashAttention-4 with deterministic=True",
    "liger": "Liger-Kernel",
    "quack": "the quack package",
    **VARIANTS,
}
PEERS = (NAIVE, TORCH, *(name for name in ON_REQUEST if name not in VARIANTS))

BOTH = ("float32", "bfloat16")
ORACLE = "the oracle, not a contender; --providers reference times it"
MODES = ("fwd", "fwd+bwd")
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """A named case at a shape, in each dtype and mode."""

    case: str
    shape: Mapping[str, int]
    dtypes: tuple[str, ...] = BOTH
    modes: tuple[str, ...] = MODES
    cold: bool = False  # empty the caches before each call
    sustained: float = 0.0  # seconds of forward calls without a rest, after the bursts


class Unsupported(Exception):
    """The implementation does not support the problem; the message has the reason."""


@dataclass(frozen=True)
class Problem:
    """One case with its tensors; with `grad`, every leaf requires a gradient."""

    case: Case
    dtype: torch.dtype
    device: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    seed: int

    @staticmethod
    def make(
        case: Case,
        dtype: torch.dtype,
        device: str,
        *,
        seed: int,
        grad: bool,
        on_device: bool = False,
    ) -> Problem:
        """Build a problem; numbers drawn ``on_device`` differ from the CPU's."""
        args, kwargs = case.make(device, dtype, seed, requires_grad=grad, on_device=on_device)
        return Problem(case, dtype, device, args, kwargs, grad, seed)

    @cached_property
    def named(self) -> dict[str, Any]:
        """Return every argument by name."""
        return named(self.case.op, self.args, self.kwargs)

    @cached_property
    def leaves(self) -> dict[str, torch.Tensor]:
        """Return the tensors that receive a gradient, by name."""
        return {} if self.case.forward_only else leaves(self.case.op, self.args, self.kwargs)

    @property
    def dropout(self) -> float:
        return self.kwargs.get("dropout_p", 0.0)

    def without_dropout(self) -> Problem:
        kwargs = {k: v for k, v in self.kwargs.items() if k not in ("dropout_p", "dropout_seed")}
        return dataclasses.replace(self, kwargs=kwargs)

    def on_cpu(self) -> Problem:
        """Return the same values on the CPU."""
        if self.device == "cpu":
            return self
        there = Problem.make(self.case, self.dtype, "cpu", seed=self.seed, grad=self.grad)
        return there if self.dropout or not there.dropout else there.without_dropout()


@dataclass(frozen=True)
class Prepared:
    """A prepared problem.

    `forward()` computes the outputs of the public op. `context()` is active around forward and
    backward. `own_dropout` marks a private dropout mask; the oracle then checks the problem without
    dropout.
    """

    label: str
    forward: Callable[[], Outputs]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    own_dropout: bool = False


@dataclass(frozen=True)
class Provider:
    """An implementation: `prepare(problem)` returns a `Prepared` or raises `Unsupported`.

    `file` is the user's file of a contender.
    """

    name: str
    prepare: Callable[[Problem], Prepared]
    file: Path | None = None

    @property
    def peer(self) -> bool:
        """Return True if the implementation is not one of our backends."""
        return self.name in PEERS or self.file is not None


def as_outputs(result: torch.Tensor | tuple[torch.Tensor, ...]) -> Outputs:
    return result if isinstance(result, tuple) else (result,)


def prepare_ours(backend: str, problem: Problem) -> Prepared:
    """Prepare one of our backends by its keyword.

    `use_backend` would leave the C++ fast path and add 20 µs that no user pays.
    """
    import pytransformer as pt

    op = problem.case.op
    reason = pt.explain(op, *problem.args, **problem.kwargs).reasons[backend]
    if reason is not None:
        raise Unsupported(reason)
    function = getattr(pt, op)
    return Prepared(
        label=f"pytransformer.{op} [{backend}]",
        forward=lambda: as_outputs(function(*problem.args, **problem.kwargs, backend=backend)),
    )


def ours(op: str) -> tuple[Provider, ...]:
    """Return the op's backends, working here or not, best first."""
    return tuple(Provider(name, partial(prepare_ours, name)) for name in OPS[op].backends)


def compiled(naive: Callable[[Problem], Prepared]) -> Provider:
    """Return the implementation "compile": torch.compile of the naive code."""

    def prepare(problem: Problem) -> Prepared:
        if why := _no_compiler(problem.device):
            raise Unsupported(why)
        prepared = naive(problem)
        # Each problem has its own code, and old code would count as recompilations.
        torch._dynamo.reset()
        return dataclasses.replace(
            prepared,
            label=f"torch.compile: {prepared.label}",
            forward=torch.compile(prepared.forward),
        )

    return Provider("compile", prepare)


@functools.cache
def _no_compiler(device: str) -> str | None:
    """Return why torch.compile cannot generate code for the device here, or None."""
    if device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "torch.compile needs a C++ compiler, and there is none"
    return None


def installed(package: str, module: str) -> Any:
    """Return an optional peer's module; raise Unsupported with the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(f"{package} is not installed here ({error})") from error


def providers(op: str) -> tuple[Provider, ...]:
    """Return all implementations of `op`: our backends, best first, then the peers."""
    peers = of_family(OPS[op].family, "PROVIDERS", {}).get(op, ())
    theirs = {peer.name for peer in peers}
    # The backend torch runs PyTorch's function, so the peer represents both.
    return tuple(provider for provider in ours(op) if provider.name not in theirs) + peers


def of_family(family: str, name: str, default: Any) -> Any:
    """Return the attribute of the family's file, or the default."""
    path = f"{__name__}.{family}"
    return (
        getattr(importlib.import_module(path), name, default)
        if importlib.util.find_spec(path)
        else default
    )
