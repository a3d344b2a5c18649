# SPDX-License-Identifier: Apache-2.0
"""The tier ``triton``: the kernels of kernels/."""
