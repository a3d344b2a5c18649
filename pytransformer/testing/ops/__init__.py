# SPDX-License-Identifier: Apache-2.0
"""Test and benchmark support of each op family, one file each: `KIT`."""
