# SPDX-License-Identifier: Apache-2.0
"""Calibration of an op that one line of plain PyTorch computes.

Both run on the fuzzer's problems, as contiguous tensors of one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing.bounds import Limits
from pytransformer.testing.oracle import Solution

from .checks import Calibration


def usual(p: Any, as_drawn: tuple[str, ...] = ()) -> Any | None:
    """Return a drawn problem without dropout, contiguous and in one dtype, or None.

    The tensors named in `as_drawn` keep their dtype. The result is None if the problem is empty or
    needs no gradient.
    """
    for name in ("dropout_p", "dropout_seed", "recompute"):
        p.keywords.pop(name, None)
    p.tensors = {
        n: (t if n in as_drawn else t.to(p.dtype)).contiguous() for n, t in p.tensors.items()
    }
    return None if not p.wanted or p.tensors["x"].numel() == 0 else p


def plain_calibration(
    problem: Callable[[int, int], Any | None],
    solve: Callable[[Any], Solution],
    plain: Callable[[Any, Mapping[str, Tensor]], Tensor],
    ours: Callable[[Any, Mapping[str, Tensor], str], Tensor],
    columns: tuple[str, ...],
    limits: Limits,
) -> Calibration:
    """Return a calibration of `plain(problem, tensors)` and `ours(problem, tensors, backend)`.

    Both return the output, which is the first of `columns`.
    """

    def results(p: Any, run: Callable[[Mapping[str, Tensor]], Tensor]) -> dict[str, Tensor]:
        given = {n: t for n, t in p.tensors.items() if n != "grad_out"}
        leaves = {
            n: t.detach().requires_grad_() if t.is_floating_point() else t for n, t in given.items()
        }
        out = run(leaves)
        grads = torch.autograd.grad(
            out, [leaves[n] for n in p.wanted], p.tensors["grad_out"].to(out.dtype)
        )
        return {columns[0]: out, **dict(zip(p.wanted, grads))}

    return Calibration(
        problem,
        solve,
        {"PyTorch": lambda p: results(p, partial(plain, p))},
        lambda p, backend: results(p, lambda t: ours(p, t, backend)),
        columns,
        lambda p: ("zero_mean" if p.data == "zero_mean" else "any", limits),
    )
