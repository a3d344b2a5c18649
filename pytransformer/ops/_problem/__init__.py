# SPDX-License-Identifier: Apache-2.0
"""Lowered arguments of the op families, shared by all backends."""
