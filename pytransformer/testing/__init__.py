# SPDX-License-Identifier: Apache-2.0
"""The testing kit: error bounds, named cases, guarded and poisoned memory, the fuzzer and its mutants.

Installed with the package, so that a user can check a backend on their own machine:

    python -m pytransformer.testing.fuzz attention --cases 500 --backend cpu
"""
