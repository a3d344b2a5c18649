# SPDX-License-Identifier: Apache-2.0
"""The ops, one file a stem; see _registry for how one is declared."""
