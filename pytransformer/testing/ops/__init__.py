# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks need of each family, a file each: `KIT`."""
