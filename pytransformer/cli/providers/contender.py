# SPDX-License-Identifier: Apache-2.0
"""A contender of the user's: a Python file whose functions have the names of ops.

A function gets the arguments of the public op, as the case has them, and returns its outputs. It
declines a problem by raising NotImplementedError, or by lacking one of the arguments. Its results
are checked as a peer's are (`check.judge`).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pytransformer.cli import UsageError
from pytransformer.cli.providers import Prepared, Problem, Provider, Unsupported, as_outputs
from pytransformer.ops._core.registry import OPS

Function = Callable[..., Any]


@functools.cache
def functions(path: Path) -> Mapping[str, Function]:
    """Run the file and return its functions that have an op's name.

    Raises:
        UsageError: the file cannot be read or run, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(f"contender_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--contender: {path} is not a Python file")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # the file may import its neighbors; last, so it shadows nothing
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--contender: {path} raised {type(error).__name__}: {error}") from error
    found = {op: vars(module)[op] for op in OPS if callable(vars(module).get(op))}
    if not found:
        raise UsageError(
            f"--contender: {path} has no function with the name of an op; the ops are"
            f" {', '.join(OPS)}"
        )
    return found


def contenders(op: str, files: Sequence[Path]) -> tuple[Provider, ...]:
    """Return the implementations of `op` in the files, each named after its file."""
    return tuple(
        Provider(path.stem, functools.partial(_prepare, path, functions(path)[op]), path)
        for path in files
        if op in functions(path)
    )


def _prepare(path: Path, function: Function, problem: Problem) -> Prepared:
    """Call the function once, because it may decline the problem."""
    forward = functools.partial(_call, function, problem, _accepted(function, problem))
    with torch.set_grad_enabled(problem.grad):
        try:
            outputs = forward()
        except NotImplementedError as error:
            raise Unsupported(f"declined: {error or 'NotImplementedError'}") from error
    if problem.grad and problem.leaves and not any(out.requires_grad for out in outputs):
        raise Unsupported("has no backward: no output requires a gradient; use --mode fwd")
    return Prepared(f"{path.name}: {problem.case.op}", forward, own_dropout=problem.dropout > 0)


def _accepted(function: Function, problem: Problem) -> dict[str, Any]:
    """Return the keyword arguments that the function gets; raise Unsupported if it lacks one."""
    known = inspect.signature(function).parameters.values()
    names = {p.name for p in known if p.kind is not p.VAR_POSITIONAL}
    anything = any(p.kind is p.VAR_KEYWORD for p in known)
    kwargs = dict(problem.kwargs)
    if "dropout_seed" not in names and not anything:
        kwargs.pop("dropout_seed", None)  # the contender draws its own mask
    missing = [name for name in kwargs if name not in names and not anything]
    if missing:
        raise Unsupported(f"has no argument {', '.join(missing)}")
    return kwargs


def _call(
    function: Function, problem: Problem, kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    outputs = as_outputs(function(*problem.args, **kwargs))
    op = problem.case.op
    expected = len(OPS[op].returned)
    if len(outputs) != expected or not all(torch.is_tensor(out) for out in outputs):
        kinds = ", ".join(type(out).__name__ for out in outputs)
        raise TypeError(f"{op} must return {expected} tensor(s), got {kinds or 'nothing'}")
    return outputs
