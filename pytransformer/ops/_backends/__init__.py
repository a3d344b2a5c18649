# SPDX-License-Identifier: Apache-2.0
"""How each tier computes the ops: a folder for each tier, a module for each stem."""
