# SPDX-License-Identifier: Apache-2.0
"""What the tiers ``triton`` and ``cuda`` do alike."""
