# SPDX-License-Identifier: Apache-2.0
"""The ops, one file a family; see _registry for how one is declared."""
