# SPDX-License-Identifier: Apache-2.0
"""Implementations of the ops, one folder per backend and one module per op family."""
