# SPDX-License-Identifier: Apache-2.0
"""Fused linear + cross entropy in Triton: the library computes logits in chunks of rows, and one
kernel per direction processes them.
"""
