# SPDX-License-Identifier: Apache-2.0
"""Tensors whose storage was freed are refused by name on the emulated CUDA ops too: the checks of tests/ops/test_freed_storage.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytransformer.testing.case import Case

sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))
import test_freed_storage as shared

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


# Every sixth in `make test`.
CASES = [pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] * (i % 6 > 0)) for i, case in enumerate(shared.CASES)]


@pytest.mark.parametrize("case", CASES)
def test_freed_tensors_are_refused(case: Case) -> None:
    args, kwargs, _ = shared.arguments_of(case, False)
    backends = shared.backends_of(case, args, kwargs)
    if "cuda" not in backends:
        pytest.skip("the CUDA kernels do not compute this case in float32")
    shared.check_forward(case, ["cuda"])
    if not case.forward_only:
        shared.check_backward(case, ["cuda"])
