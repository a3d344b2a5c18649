# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in Triton: shared code in ``rows``, kernels in the other modules."""
