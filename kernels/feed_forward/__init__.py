# SPDX-License-Identifier: Apache-2.0
"""The feed-forward network in Triton: the products that have more to do than multiply. See docs/triton-feed_forward.md."""
