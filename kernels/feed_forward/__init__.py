# SPDX-License-Identifier: Apache-2.0
"""Feed-forward network in Triton: the products that have an epilogue. See docs/triton.md."""
