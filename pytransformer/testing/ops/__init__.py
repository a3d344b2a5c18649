# SPDX-License-Identifier: Apache-2.0
"""Named cases and exact results of each op family, one file each: `KIT`."""
