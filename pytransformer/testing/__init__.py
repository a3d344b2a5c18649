# SPDX-License-Identifier: Apache-2.0
"""The testing kit: error bounds, named cases, guarded and poisoned memory, the fuzzer and its mutants.

Installed with the package, so that a user can check a backend on their own machine:

    python -m pytransformer.testing.fuzz attention --cases 500 --backend cpu
"""

import os

if os.environ.get("PYTRANSFORMER_TEST_SEED", "0") != "0":  # of a test run, whose child processes draw as it does
    from .seeds import shift_seeds

    shift_seeds(int(os.environ["PYTRANSFORMER_TEST_SEED"]))
