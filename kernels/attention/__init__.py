# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton: kernels in ``fwd`` and ``bwd``, a step of theirs in each of ``mask``,
``score_mod``, ``softmax`` and ``tiles``, arguments in ``args``, plans in ``configs``.
"""
