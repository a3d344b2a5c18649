# SPDX-License-Identifier: Apache-2.0
"""Calls each vector function of MKL once on one thread, before several threads can call it first.

PyTorch computes exp, tanh and similar functions of contiguous float tensors with MKL's vector
functions on several threads. MKL 2024.2 selects a function's kernel at its first call. If two
threads make that call at once, one may get a kernel of half the digits for its share, although the
most accurate was requested: exp differs by 1.5e-4 of its value in 2 to 4 of 100 processes on a busy
machine (https://github.com/pytorch/pytorch/issues/188792). The reference, to which every backend is
compared, calls these functions.
"""

from __future__ import annotations

import torch

# Every function of one argument that PyTorch computes with MKL; a test compares them with those in
# its library.
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
