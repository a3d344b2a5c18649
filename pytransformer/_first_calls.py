# SPDX-License-Identifier: Apache-2.0
"""Asks MKL for each of its vector functions once, on one thread, before two threads can ask for it
for the first time at once.

PyTorch's exp, tanh and the like of contiguous float tensors call MKL's vector functions from
several threads, and MKL 2024.2 chooses
a function's kernel at its first call. Where that is two threads' at once, one of them may get a
kernel of half the digits for its share
of that one call, though the most accurate was asked for: exp off by 1.5e-4 of its value, in 2 to 4
of 100 processes on a busy machine
(https://github.com/pytorch/pytorch/issues/188792). The reference, by which everything here is
judged, calls them.
"""

from __future__ import annotations

import torch

# Every function of one argument whose elements PyTorch leaves to MKL; a test compares them with
# those in its library.
FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


def choose_kernels() -> None:
    """Calls each of FUNCTIONS with one number, which is too few for a second thread. Takes a few
    milliseconds, once."""
    if torch.backends.mkl.is_available():
        for dtype in (torch.float32, torch.float64):
            number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for function in FUNCTIONS:
                function(number)
