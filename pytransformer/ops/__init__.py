# SPDX-License-Identifier: Apache-2.0
"""The ops, one file per op family; _core/op.py declares an op."""
