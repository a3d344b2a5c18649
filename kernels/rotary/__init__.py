# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in Triton: ``rows`` is what the kernels share, ``fwd``, ``append`` and ``bwd`` are they."""
