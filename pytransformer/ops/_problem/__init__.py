# SPDX-License-Identifier: Apache-2.0
"""What an op's arguments come to before any backend sees them, by family."""
