# SPDX-License-Identifier: Apache-2.0
"""Layer norm, RMS norm and residual + dropout + norm in Triton: ``rows`` is what the kernels share, ``fwd`` and ``bwd`` are they."""
