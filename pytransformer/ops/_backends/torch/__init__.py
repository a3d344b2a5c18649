# SPDX-License-Identifier: Apache-2.0
"""The backend ``torch``, PyTorch's fused kernels called by their aten ops."""
