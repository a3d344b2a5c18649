# SPDX-License-Identifier: Apache-2.0
"""The tool that runs PyTorch's tests both ways, on a small file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import pytorch_tests

STAND_IN = """
import torch, pytest
import pytransformer.drop_in as ours
sdpa = torch.nn.functional.scaled_dot_product_attention
def test_same(): assert sdpa(*torch.ones(3, 1, 1, 2, 8)).shape[-1] == 8
def test_only_theirs_passes(): assert not ours.is_active()
def test_neither_passes(): assert False
def test_skipped(): pytest.skip("not counted")
"""


@pytest.mark.slow  # five runs of pytest
def test_reports_tests_that_fail_only_with_our_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_stand_in.py"
    path.write_text(STAND_IN)
    assert pytorch_tests.main([str(path)]) == 1
    output = capsys.readouterr().out
    assert "PyTorch's kernels: 2 of 3 pass. Ours: 1 of 3." in output
    assert output.count("fails with ours alone") == 1 and "test_only_theirs_passes" in output
    monkeypatch.setitem(pytorch_tests.KNOWN, "test_only_*_passes", "on purpose")
    assert pytorch_tests.main([str(path)]) == 0
    assert pytorch_tests.main([str(path), "-k", "same"]) == 0


def test_missing_file_raises_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert pytorch_tests.main([]) == 2
    assert "test/test_transformers.py" in capsys.readouterr().out
