# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, installed as ``pytransformer.kernels``.

Importing this package imports no Triton and touches no GPU; each kernel module imports Triton when
an op first calls it.
"""
