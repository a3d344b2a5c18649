# SPDX-License-Identifier: Apache-2.0
"""Texts and images of installed packages, and simple baselines on them."""
