# SPDX-License-Identifier: Apache-2.0
"""One sequence over several processes: each has some rows of every layer, and attention goes round (context parallel).

Only attention mixes rows, so it alone changes: to :func:`pytransformer.distributed.ring_attention`. A model is given whole sequences and
takes its own rows of them; its loss is the mean over all ranks' labels, and its gradient this rank's share.
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

CHUNKS = 2  # a rank's, of the layout "zigzag": under causality every rank has as many visible pairs


class Context(NamedTuple):
    """The ranks that share a sequence."""

    group: dist.ProcessGroup
    ranks: int

    def length(self, length: int) -> int:
        """That of the sequence with padding at the end, so that every rank has as many rows."""
        return length + -length % (CHUNKS * self.ranks)

    def mask(self, mask: torch.Tensor | None, batch: int, length: int, device: torch.device) -> torch.Tensor | None:
        """A model's attention_mask of the whole sequence, which hides that padding too."""
        extra = self.length(length) - length
        if mask is None:
            return torch.full((batch,), length, device=device) if extra else None
        return nn.functional.pad(mask, (0, extra)) if mask.dim() == 2 else mask

    def rows(self, x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """This rank's rows of the whole (B, L), `fill` where it is padded."""
        padded = nn.functional.pad(x, (0, self.length(x.shape[1]) - x.shape[1]), value=fill)
        return shard_sequence(padded, group=self.group, dim=1)

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        """Of this rank's rows. Gradients of what all ranks have alike are its share: whoever trains sums all parameters' over the ranks."""
        return ring_attention(query, key, value, group=self.group, sum_gradients=False, **options)

    def mean_loss(self, head: Classifier, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Over the labels of all ranks, of which these are a part. Backward gives this rank's share of the mean's gradient."""
        count = (labels != IGNORE).sum()
        return _Mean.apply(head.loss(hidden, labels, reduction="sum"), count, self.group)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        found = sum_over_ranks([total.detach().double(), count.double()], group)
        ctx.count = found[1]
        return (found[0] / found[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grad / ctx.count).to(grad.dtype), None, None


@contextlib.contextmanager
def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Within it the model's calls are of sequences that the ranks of a group share. Every rank calls with the same whole batch.

    ``loss`` is that of one process on every rank; the sum over the ranks of their parameters' gradients is its gradient. Hidden states and
    logits are of this rank's rows, see :func:`pytransformer.distributed.gather_sequence`. Attention's dropout has the masks of one process,
    other dropout is each rank's own.

    Args:
        model: of ``pytransformer.models``, one that takes contexts: GPT, Transformer, T5.
        group: the ranks; None is the default group.

    Raises:
        ValueError: another model, or one with blocks that mix rows otherwise (patterns, experts).
    """
    _, ranks = check_group("context_parallel", group)
    _check(model)
    context = Context(group if group is not None else dist.group.WORLD, ranks)  # type: ignore[arg-type]
    users: list[Any] = [m for m in model.modules() if isinstance(m, MultiHeadAttention) or m is model]
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
            f"context_parallel: {type(model).__name__} does not take a part of a sequence; GPT, Transformer and T5 do: use data, or tensor"
        )
    for name, block in model.named_modules():
        if isinstance(block, Block):
            mixing = block.mixing
            if type(mixing) is not MultiHeadAttention or mixing.pattern is not None or mixing.observer is not None:
                raise ValueError(f"context_parallel: {name} mixes rows by more than plain attention, which needs them all")
    if getattr(getattr(model, "config", None), "experts", None):
        raise ValueError(
            "context_parallel: experts choose among all tokens: use MixtureOfExperts.parallelize(group), and data for the rest"
        )
