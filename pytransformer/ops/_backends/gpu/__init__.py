# SPDX-License-Identifier: Apache-2.0
"""What the backends ``triton`` and ``cuda`` do alike."""
