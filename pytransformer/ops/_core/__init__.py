# SPDX-License-Identifier: Apache-2.0
"""Shared code of the ops: backend registry, autograd, tensor checks, fallbacks, native library."""
