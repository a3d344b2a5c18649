# SPDX-License-Identifier: Apache-2.0
"""Fuzzer, mutants and calibration of each op family, one file each: `CHECKS`."""
