# SPDX-License-Identifier: Apache-2.0
"""How each backend computes the ops: a folder for each backend, a module for each family."""
