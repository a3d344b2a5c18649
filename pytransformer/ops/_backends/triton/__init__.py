# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton``, the kernels in kernels/."""
