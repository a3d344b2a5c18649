# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that are split over several processes, on torch.distributed alone. See docs/scaling.md."""

from .layout import gather_sequence, shard_sequence
from .ring import ring_attention
from .ulysses import ulysses_attention

__all__ = ["gather_sequence", "ring_attention", "shard_sequence", "ulysses_attention"]
