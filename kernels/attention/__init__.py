# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton: kernel arguments in ``problem``, shared code in ``tiles``, kernels in
``fwd`` and ``bwd``.
"""
