# SPDX-License-Identifier: Apache-2.0
"""Layer norm, RMS norm and residual + dropout + norm in Triton: shared code in ``rows``, kernels in
``fwd`` and ``bwd``.
"""
