# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each process has some rows of a sequence in every layer.

Only attention mixes rows, so only attention changes, to
:func:`pytransformer.distributed.ring_attention`. A model receives full sequences and selects this
rank's rows. Its loss is the mean over the labels of all ranks; its gradient is this rank's share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.group import check_group, sum_over_ranks
from ..distributed.layout import shard_sequence
from ..distributed.ring import ring_attention
from .attention import MultiHeadAttention
from .blocks import Block, Stack
from .heads import IGNORE, Classifier

CHUNKS = 2  # per rank, of the layout "zigzag": it balances the visible pairs of causal attention


class Context(NamedTuple):
    """The ranks that share a sequence."""

    group: dist.ProcessGroup
    ranks: int

    def length(self, length: int) -> int:
        """Return the length of the sequence padded at the end to equal rows per rank."""
        return length + -length % (CHUNKS * self.ranks)

    def mask(
        self, mask: torch.Tensor | None, batch: int, length: int, device: torch.device
    ) -> torch.Tensor | None:
        """Return the model's attention_mask of the full sequence, extended to hide that padding."""
        extra = self.length(length) - length
        if mask is None:
            return torch.full((batch,), length, device=device) if extra else None
        return nn.functional.pad(mask, (0, extra)) if mask.dim() == 2 else mask

    def rows(self, x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return this rank's rows of the full (B, L), padded with `fill`."""
        padded = nn.functional.pad(x, (0, self.length(x.shape[1]) - x.shape[1]), value=fill)
        return shard_sequence(padded, group=self.group, dim=1)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> Any:
        """Return ring attention for this rank's rows.

        Gradients of replicated tensors are this rank's share; the training loop sums all
        parameters' gradients over the ranks.
        """
        return ring_attention(query, key, value, group=self.group, sum_gradients=False, **options)

    def mean_loss(
        self, head: Classifier, hidden: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean loss over all ranks' labels; backward computes this rank's share."""
        count = (labels != IGNORE).sum()
        return _Mean.apply(head.loss(hidden, labels, reduction="sum"), count, self.group)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        found = sum_over_ranks([total.detach().double(), count.double()], group)
        ctx.count = found[1]
        return (found[0] / found[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grad / ctx.count).to(grad.dtype), None, None


@contextlib.contextmanager
def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Split the sequences of the model's calls over the ranks of a group.

    Every rank calls the model with the same full batch. ``loss`` equals the loss of one process on
    every rank; the sum of the parameters' gradients over the ranks is its gradient. Hidden states
    and logits are this rank's rows; see :func:`pytransformer.distributed.gather_sequence`.
    Attention dropout has the masks of one process; other dropout is independent per rank.

    Args:
        model: a model of ``pytransformer.models`` that supports context parallelism: GPT,
            Transformer, T5.
        group: the ranks; None means the default group.

    Raises:
        ValueError: another model, or one whose blocks mix rows in other ways (patterns, experts).
    """
    _, ranks = check_group("context_parallel", group)
    _check(model)
    context = Context(group if group is not None else dist.group.WORLD, ranks)  # type: ignore[arg-type]
    users: list[Any] = [
        m for m in model.modules() if isinstance(m, MultiHeadAttention) or m is model
    ]
    stacks = {m: m.packs for m in model.modules() if isinstance(m, Stack)}
    try:
        for m in users:
            m.context = context
        for stack in stacks:
            stack.packs = False
        yield
    finally:
        for m in users:
            m.context = None
        for stack, packs in stacks.items():
            stack.packs = packs


def _check(model: nn.Module) -> None:
    if not getattr(model, "takes_context", False):
        raise ValueError(
            f"context_parallel: {type(model).__name__} does not take a part of a sequence; GPT,"
            " Transformer and T5 do: use data, or tensor"
        )
    for name, block in model.named_modules():
        if isinstance(block, Block):
            mixing = block.mixing
            if (
                type(mixing) is not MultiHeadAttention
                or mixing.pattern is not None
                or mixing.observer is not None
            ):
                raise ValueError(
                    f"context_parallel: {name} mixes rows by more than plain attention, which needs"
                    " them all"
                )
    if getattr(getattr(model, "config", None), "experts", None):
        raise ValueError(
            "context_parallel: experts choose among all tokens: use"
            " MixtureOfExperts.parallelize(group), and data for the rest"
        )
