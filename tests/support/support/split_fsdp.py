# SPDX-License-Identifier: Apache-2.0
"""Parameters of every op under FSDP2, which frees them when it reshards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import pytransformer as pt
from pytransformer.testing.case import Case, leaves, named
from pytransformer.testing.cases import case


class Holder(nn.Module):
    """A module with every differentiable argument of a call, except the first, as a parameter."""

    def __init__(self, chosen: Case) -> None:
        super().__init__()
        self.op = chosen.op
        args, kwargs = chosen.make("cpu", torch.float32, seed=0)
        self.others = named(chosen.op, args, kwargs)
        (self.first, self.x), *parameters = leaves(chosen.op, args, kwargs).items()
        self.names = [name for name, _ in parameters]
        for name, t in parameters:
            self.register_parameter(name, nn.Parameter(t))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {
            **self.others,
            self.first: x,
            **{name: getattr(self, name) for name in self.names},
        }
        outputs = getattr(pt, self.op)(**values)
        return sum(
            o.square().sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,))
        )


def gradients_and_refusal(rank: int, group: Any, name: str) -> str:
    """Compare a sharded module's gradients with those of plain parameters.

    Then free the parameters between forward and backward and return the error's message.
    """
    holder = Holder(case(name))
    x = holder.x.requires_grad_()
    expected = torch.autograd.grad(holder(x), [x, *holder.parameters()])
    sharded: Any = fully_shard(holder, mesh=DeviceMesh.from_group(group, "cpu"))
    sharded(x).backward()
    gradients = [x.grad, *(p.grad.full_tensor() for p in sharded.parameters())]
    for gradient, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, plain)
    sharded.unshard()
    loss = Holder.forward(holder, x)
    sharded.reshard()
    try:
        torch.autograd.grad(loss, x)
    except RuntimeError as error:
        return str(error)
    return "no error"
