# SPDX-License-Identifier: Apache-2.0
"""Feed-forward network in Triton: the gemms with a fused epilogue. See docs/triton.md."""
