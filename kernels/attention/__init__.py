# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton: ``problem`` says what the kernels get, ``tiles`` what they share, ``fwd`` and ``bwd`` are the kernels."""
