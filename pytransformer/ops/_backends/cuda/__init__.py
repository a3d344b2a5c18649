# SPDX-License-Identifier: Apache-2.0
"""The tier ``cuda``: CUDA C++ of csrc/cuda."""
