# SPDX-License-Identifier: Apache-2.0
"""Test support: error bounds, named cases, guarded and poisoned memory, the fuzzer, its mutants.

It is installed with the package, so that users can check a backend on their machines:

    python -m pytransformer.testing.fuzz attention --cases 500 --backend cpu
"""

import os

# Child processes of a test run share its seed shift.
if os.environ.get("PYTRANSFORMER_TEST_SEED", "0") != "0":
    from .seeds import shift_seeds

    shift_seeds(int(os.environ["PYTRANSFORMER_TEST_SEED"]))
