# SPDX-License-Identifier: Apache-2.0
"""What every op stands on: the registry of backends, autograd, checks of tensors, fallbacks, the native library."""
