# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda``, CUDA C++ in csrc/cuda."""
