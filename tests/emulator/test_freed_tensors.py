# SPDX-License-Identifier: Apache-2.0
"""Emulated CUDA kernels refuse freed tensors by name: the checks of test_freed_storage.py.

That file is in tests/ops.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytransformer.testing.case import Case

sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))
import test_freed_storage as shared

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


@pytest.mark.parametrize("case", shared.SLOW_CASES)
def test_freed_tensors_are_refused_by_name(case: Case) -> None:
    shared.check_backend(case, "cuda")
