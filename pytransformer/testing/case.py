# SPDX-License-Identifier: Apache-2.0
"""One named problem: an operation, a shape, an argument builder, and its work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops._core.registry import OPS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Builder = Callable[["Draw"], Mapping[str, Any]]
FORWARD_ONLY = "forward_only"  # the tag of cases without gradients
SEEDED: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 1234}


@dataclass(frozen=True)
class Draw:
    """The random source of a builder; it is on the CPU, so that seeds are device-independent."""

    shape: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator
    on_device: torch.Generator | None = None  # draws normal numbers on the device itself, if set

    def __getitem__(self, name: str) -> int:
        return self.shape[name]

    def normal(
        self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        generator = self.on_device or self.generator
        x = (
            torch.randn(*size, generator=generator, dtype=torch.float32, device=generator.device)
            * scale
        )
        return x.to(device=self.device, dtype=dtype or self.dtype)

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        """Return uniform int64 in [low, high]."""
        return torch.randint(low, high + 1, size, generator=self.generator).to(self.device)


@dataclass(frozen=True)
class Work:
    """The work of a problem, (forward, backward).

    Floating-point operations count 2 per multiply-add of the matrix products. Elements count every
    input and output once.
    """

    flops: tuple[float, float]
    elements: tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One named problem; `work` maps a shape to its work."""

    name: str
    op: str
    shape: Mapping[str, int]
    build: Builder
    tags: frozenset[str]
    work: Callable[[Mapping[str, int]], Work]

    @property
    def forward_only(self) -> bool:
        return FORWARD_ONLY in self.tags

    def resize(self, **shape: int) -> Case:
        """Return the problem at another shape; changing only Hq preserves the GQA group size."""
        new = {**self.shape, **shape}
        if "Hq" in shape and "Hkv" not in shape and "Hkv" in self.shape:
            new["Hkv"] = max(1, shape["Hq"] * self.shape["Hkv"] // self.shape["Hq"])
        return dataclasses.replace(self, shape=new)

    def make(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int,
        requires_grad: bool = False,
        on_device: bool = False,
    ) -> Arguments:
        """Return (args, kwargs) of `pytransformer.<op>`.

        Equal seeds give equal values on every device and, up to rounding, in every dtype. With
        `on_device`, the device draws normal numbers and values differ. In a case without gradients
        nothing requires one.
        """
        there = torch.Generator(device).manual_seed(seed) if on_device else None
        values = dict(
            self.build(
                Draw(
                    self.shape,
                    torch.device(device),
                    dtype,
                    torch.Generator().manual_seed(seed),
                    there,
                )
            )
        )
        given = list(itertools.takewhile(values.__contains__, OPS[self.op].positional))
        args = tuple(values.pop(name) for name in given)
        if requires_grad and not self.forward_only:
            for leaf in leaves(self.op, args, values).values():
                leaf.requires_grad_()
        return args, values

    def flops(self, direction: str = "fwd") -> float:
        """Return the floating-point operations; direction is "fwd", "bwd" or "both"."""
        return _of(self.work(self.shape).flops, direction)

    def bytes(self, dtype: torch.dtype, direction: str = "fwd") -> int:
        """Return the min memory traffic with everything stored in `dtype`."""
        return int(dtype.itemsize * _of(self.work(self.shape).elements, direction))


@dataclass
class Problem:
    """One call of an op of rows with its upstream gradients, for the exact solutions.

    `data` names the distribution, `layouts` the memory of each tensor, `wanted` the tensors with a
    gradient, `features` what a fuzzer drew, and `dims` the number of normalized dimensions.
    """

    op: str
    dtype: torch.dtype
    data: str
    tensors: dict[str, torch.Tensor]  # the arguments, and grad_* of each output
    layouts: dict[str, str]
    keywords: dict[str, Any]
    wanted: list[str]
    features: set[str] = field(default_factory=set)
    dims: int = 1

    @staticmethod
    def of_call(
        op: str,
        named: Mapping[str, Any],
        grads: Sequence[torch.Tensor] | None,
        tensors: Sequence[str],
        keywords: Sequence[str],
    ) -> Problem:
        """Return the problem of a call with these arguments, of which some are tensors."""
        given = {name: named[name] for name in tensors if named.get(name) is not None}
        given |= dict(zip(("grad_out", "grad_residual_out"), grads or ()))
        chosen = {name: named[name] for name in keywords if name in named}
        return Problem(op, named[tensors[0]].dtype, "zero_mean", given, {}, chosen, [])

    @property
    def stream_dtype(self) -> torch.dtype:
        """Return the dtype of the residual, or of x without one."""
        return self.tensors["residual"].dtype if "residual" in self.tensors else self.dtype

    @property
    def coarse_dtype(self) -> torch.dtype:
        return max(self.dtype, self.stream_dtype, key=lambda d: torch.finfo(d).eps)

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{n} {str(t.dtype)[6:]} {tuple(t.shape)} {self.layouts[n]}"
            for n, t in self.tensors.items()
        )
        return (
            f"{self.op} over {self.dims} dims, {self.data} data, {self.keywords}, gradients of"
            f" {self.wanted}: {shapes}"
        )


def _of(both: tuple[float, float], direction: str) -> float:
    return {"fwd": both[0], "bwd": both[1], "both": sum(both)}[direction]


def named(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of a call of the public op by name."""
    return {**dict(zip(OPS[op].positional, args)), **kwargs}


def leaves(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that get a gradient, by name; bias objects give "slopes" and "table"."""
    found = {}
    for name, value in named(op, args, kwargs).items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                found[name] = value
        elif name == "bias" and value is not None:
            part = "slopes" if hasattr(value, "slopes") else "table"
            found[part] = getattr(value, part)
    return found


def made(
    name: str,
    op: str,
    dims: str,
    size: Mapping[str, int],
    build: Builder,
    tags: str,
    work: Callable[..., Work],
) -> Case:
    """Return a case with the dimensions of a size that `dims` names."""
    return Case(name, op, {k: size[k] for k in dims.split()}, build, frozenset(tags.split()), work)
