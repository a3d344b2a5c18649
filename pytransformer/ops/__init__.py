# SPDX-License-Identifier: Apache-2.0
"""The ops, one file per op family; _core/registry.py declares an op."""
