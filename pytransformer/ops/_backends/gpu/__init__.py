# SPDX-License-Identifier: Apache-2.0
"""Code that the backends ``triton`` and ``cuda`` share."""
