# SPDX-License-Identifier: Apache-2.0
"""Position encodings, added to embeddings, and position biases, added to scores."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.masks import AlibiBias, RelativePositionBias


def sinusoidal(
    length: int,
    d_model: int,
    *,
    start: int = 0,
    halves: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the sinusoidal encoding (length, d_model) of the positions p from ``start`` on.

    ``PE[p, 2i] = sin(p / 10000^(2i/d))``, ``PE[p, 2i+1] = cos(...)``. With ``halves`` all sines
    precede all cosines (Marian). ``PE[p + s]`` is a linear map of ``PE[p]``, the same for every p.

    Source: Vaswani et al. (2017), section 3.5.
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal: d_model must be even, got {d_model}")
    # Meta arithmetic imports torch's compiler, which takes seconds.
    if torch.empty(0, device=device).device.type == "meta":
        return torch.empty(length, d_model, dtype=dtype, device=device)
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model)
    angles = (
        torch.arange(start, start + length, dtype=torch.float64, device=device)[:, None] * rates
    )
    parts = (angles.sin(), angles.cos())
    return (torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(1)).to(dtype)


class Positions(nn.Module):
    """Base of :class:`SinusoidalPositions` and :class:`LearnedPositions`.

    ``weight`` is (max_length, d_model), indexed by position.
    """

    weight: torch.Tensor

    def forward(self, length: int, start: int = 0, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return (length, d_model) from ``start`` on, or (B, length, d_model) for ``ids``.

        Raises:
            ValueError: a position is out of range.
        """
        max_length = self.weight.shape[0]
        if ids is not None:
            looked_at = (
                ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling()
            )
            if looked_at and not 0 <= int(ids.min()) <= int(ids.max()) < max_length:
                raise ValueError(
                    f"position ids must be between 0 and {max_length - 1}, got {int(ids.min())} to"
                    f" {int(ids.max())}"
                )
            return nn.functional.embedding(ids, self.weight)
        if start + length > max_length:
            raise ValueError(
                f"a sequence of {start + length} tokens is longer than the model's {max_length}"
                " positions"
            )
        return self.weight[start : start + length]


class SinusoidalPositions(Positions):
    """:func:`sinusoidal` as a table that is neither trained nor saved."""

    def __init__(self, max_length: int, d_model: int, halves: bool = False) -> None:
        super().__init__()
        self.register_buffer(
            "weight", sinusoidal(max_length, d_model, halves=halves), persistent=False
        )


class LearnedPositions(Positions):
    """One trained vector per position."""

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, d_model).normal_(std=0.02))


class RelativePositionTable(nn.Module):
    """T5's table (buckets, heads) of biases by distance.

    A call returns the ``bias`` of :func:`pytransformer.attention`. Neither the (Lq, Lk) bias nor
    its gradient is materialized.
    """

    def __init__(
        self, buckets: int, num_heads: int, *, bidirectional: bool, max_distance: int = 128
    ) -> None:
        super().__init__()
        self.bidirectional, self.max_distance = bidirectional, max_distance
        self.table = nn.Parameter(torch.empty(buckets, num_heads).normal_(std=0.02))

    def forward(self) -> RelativePositionBias:
        return RelativePositionBias(self.table, self.bidirectional, self.max_distance)


class Alibi(nn.Module):
    """ALiBi's ``bias`` of :func:`pytransformer.attention`, with slopes ``2^(-8 (h+1) / H)``.

    If H is not a power of two, the paper's rule applies: the slopes of the next lower power, then
    every other slope of the next higher power.

    Source: Press, Smith, Lewis (2022), section 3.
    """

    slopes: torch.Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        power = 1 << (num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
        slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    def forward(self) -> AlibiBias:
        return AlibiBias(self.slopes)
