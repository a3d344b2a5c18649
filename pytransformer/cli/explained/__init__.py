# SPDX-License-Identifier: Apache-2.0
"""The op families of `pytransformer explain`, one file each, loaded by name.

A file has `SHAPES`, the meaning of --shape for each op; `call(arguments, tensor)`, which returns
the (args, kwargs) of the public op; and optionally `add_arguments(group)`. For a family without a
file, the first named case gives the call, and --shape sets its dimensions in order.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from pytransformer.cli import UsageError
from pytransformer.cli.benchmark.plan import DTYPES, OPS, cases
from pytransformer.ops._core.registry import OPS as SPECS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Tensor = Callable[..., torch.Tensor]


def family_file(family: str) -> ModuleType | None:
    path = f"{__name__}.{family}"
    return importlib.import_module(path) if importlib.util.find_spec(path) else None


def shapes() -> dict[str, str]:
    """Return the meaning of --shape for each op."""
    found = {}
    for op in OPS:
        file = family_file(SPECS[op].family)
        found[op] = file.SHAPES[op] if file else ",".join(cases(op)[0].shape).upper()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for family in dict.fromkeys(SPECS[op].family for op in OPS):
        file = family_file(family)
        if file and hasattr(file, "add_arguments"):
            ops = [op for op in OPS if SPECS[op].family == family]
            file.add_arguments(
                parser.add_argument_group(
                    " and ".join([", ".join(ops[:-1]), ops[-1]] if ops[1:] else ops)
                )
            )


def call(arguments: argparse.Namespace) -> Arguments:
    """Return (args, kwargs) of the public op for the command line, with undefined contents."""
    dtype = DTYPES[arguments.dtype]

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(
            shape,
            dtype=of,
            device=arguments.device,
            requires_grad=arguments.grad and of.is_floating_point,
        )

    file = family_file(SPECS[arguments.op].family)
    if file:
        return file.call(arguments, tensor)
    first = cases(arguments.op)[0]
    check_length(arguments, len(first.shape))
    resized = first.resize(**dict(zip(first.shape, arguments.shape)))
    return resized.make(arguments.device, dtype, seed=0, requires_grad=arguments.grad)


def check_length(arguments: argparse.Namespace, *lengths: int) -> None:
    """Raise UsageError unless --shape has one of these lengths."""
    if len(arguments.shape) not in lengths:
        got = ",".join(map(str, arguments.shape))
        raise UsageError(f"--shape of {arguments.op} is {shapes()[arguments.op]}, got {got}")


def dropout(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"dropout_p": arguments.dropout, "dropout_seed": 0} if arguments.dropout else {}
