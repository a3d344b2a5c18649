# SPDX-License-Identifier: Apache-2.0
"""Dropout of norms and networks on a part of a larger problem's rows or hidden columns."""

from __future__ import annotations

import torch

from pytransformer.ops.feed_forward import feed_forward_op
from pytransformer.ops.layer_norm import add_norm_op
from pytransformer.reference.philox import TAG_ADD_NORM, TAG_FEED_FORWARD, column_keep_mask

ROW_STARTS = (5, 2**32 - 4, 2**40 + 1)  # within 32 bits, across 2^32, and beyond


def check_norm_starts(backend: str, columns: int, dtype: torch.dtype = torch.float32) -> None:
    """Assert that row_start offsets add_norm's mask like the reference, forward and backward."""
    x, seed = (
        torch.full((3, 4, columns), 7.0, dtype=dtype, requires_grad=True),
        torch.tensor(-(2**61) + 12345),
    )
    a, _, _ = add_norm_op.prepare(x, None, None, dropout_p=0.3, dropout_seed=seed)
    for start in ROW_STARTS:
        _, stream = add_norm_op(a._replace(row_start=start), backend, True)[:2]
        (dx,) = torch.autograd.grad(stream.sum(), x)
        keep = column_keep_mask(seed, 0.3, 12, columns, TAG_ADD_NORM, start).view(x.shape)
        assert torch.equal(stream != 0, keep) and torch.equal(dx != 0, keep), f"row_start={start}"


def check_hidden_starts(
    backend: str, columns: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Assert the same for feed_forward with row_start and each of these column_starts.

    Identity weights expose the hidden activations.
    """
    size = 72
    x, eye, seed = (
        torch.full((3, 4, size), 3.0, dtype=dtype, requires_grad=True),
        torch.eye(size, dtype=dtype),
        torch.tensor(77),
    )
    a, _, _ = feed_forward_op.prepare(x, eye, None, eye, None, dropout_p=0.3, dropout_seed=seed)
    for row in ROW_STARTS:
        for column in columns:
            (out,) = feed_forward_op(a._replace(row_start=row, column_start=column), backend, True)[
                :1
            ]
            (dx,) = torch.autograd.grad(out.sum(), x)
            keep = column_keep_mask(seed, 0.3, 12, size, TAG_FEED_FORWARD, row, column).view(
                x.shape
            )
            assert torch.equal(out != 0, keep) and torch.equal(dx != 0, keep), (
                f"row_start={row}, column_start={column}"
            )
