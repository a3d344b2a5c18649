# SPDX-License-Identifier: Apache-2.0
"""Tolerances, named cases and exact results that `verify`, `bench` and `doctor` check against."""
