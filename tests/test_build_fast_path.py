# SPDX-License-Identifier: Apache-2.0
"""Building the C++ fast path: a failure gives a reason and does not end an unforced install."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

CSRC = Path(__file__).resolve().parent.parent / "csrc"
MODULE = 'extern "C" int PyInit__fast_path() { return 0; }\n'


@pytest.fixture
def builder(native_tree: Callable[..., ModuleType]) -> ModuleType:
    """Return native_build over a tree with one CPU source and a fast path without torch headers."""
    sources = {
        "cpu/core/isa.cpp": "int nothing;\n",
        "fast_path/unit.cpp": MODULE,
        "bindings.cpp": "int other;\n",
    }
    module = native_tree(
        sources, {"CPU_ISAS": "generic", "BINDINGS": "1", "CUDA": "0", "FAST_PATH": "auto"}
    )
    if (why_not := module.make_plan("1.0").why_not_fast_path) is not None:
        pytest.skip(f"no C++ fast path can be built here: {why_not}")
    return module


def installed(builder: ModuleType, package: Path) -> tuple[bool, dict[str, object]]:
    """Return whether an install contains a fast path, and its build report."""
    plan = builder.make_plan("1.0")
    builder.install(plan, builder.build(plan), package)
    return (package / builder.fast_path_build.MODULE).exists(), json.loads(
        (package / "_build_info.json").read_text()
    )["fast_path"]


def test_build_report_names_the_target(builder: ModuleType, tmp_path: Path) -> None:
    there, output = installed(builder, tmp_path / "package")
    assert there and output["built"] and output["reason"] is None
    assert (output["torch"], output["git_version"]) == (
        str(torch.__version__),
        torch.version.git_version,
    )


def test_failing_fast_path_is_left_out_and_comes_back(
    builder: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, package = tmp_path / "csrc" / "fast_path" / "unit.cpp", tmp_path / "package"
    assert installed(builder, package)[0]
    source.write_text("#error this torch is too new\n")
    there, output = installed(builder, package)
    assert not there and not output["built"]
    assert "its compilation fails" in str(output["reason"]) and "this torch is too new" in str(
        output["reason"]
    )
    assert "this torch is too new" in capfd.readouterr().err
    monkeypatch.setenv("PYTRANSFORMER_FAST_PATH", "1")
    with pytest.raises(
        builder.BuildError,
        match="PYTRANSFORMER_FAST_PATH=1, but it cannot be built: its compilation fails",
    ):
        installed(builder, package)
    source.write_text(MODULE)
    assert installed(builder, package)[0]


@pytest.mark.parametrize("option", ["FAST_PATH", "BINDINGS"])
def test_fast_path_is_optional(
    option: str, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PYTRANSFORMER_{option}", "0")
    there, output = installed(builder, tmp_path / "package")
    assert not there and output == {
        "built": False,
        "reason": f"switched off by PYTRANSFORMER_{option}=0",
    }


def test_other_torch_headers_force_a_compilation(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's headers are system headers, whose changes no dependency file records."""
    plan = builder.make_plan("1.0")
    before = builder._ninja_text(plan)
    monkeypatch.setattr(builder.fast_path_build, "stamp", lambda torch: {"torch": "2.99.0"})
    assert "2.99.0" not in before and "2.99.0" in builder._ninja_text(plan)
