# SPDX-License-Identifier: Apache-2.0
"""Fuzzers, mutants, faults, sweeps and guarded memory, for tests only.

PYTHONPATH=tests/support python -m support.fuzz attention --cases 500 --backend cpu
"""

import os

# Child processes of a test run share its seed shift.
if os.environ.get("PYTRANSFORMER_TEST_SEED", "0") != "0":
    from .seeds import shift_seeds

    shift_seeds(int(os.environ["PYTRANSFORMER_TEST_SEED"]))
