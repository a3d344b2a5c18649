# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks need of each stem, a file each: `KIT`."""
