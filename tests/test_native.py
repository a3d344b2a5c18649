# SPDX-License-Identifier: Apache-2.0
"""The built libraries: dependencies, instruction sets, and selection."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytransformer.ops._core import native

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = sorted((ROOT / "build" / "native-release").glob("cpu/*/kernels.cpp.*.o"))
C = torch.ops.pytransformer_C

pytestmark = pytest.mark.skipif(
    (why_not := native.why_not("cpu_isa")) is not None,
    reason=f"the CPU library is not there: {why_not}",
)
needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")


@pytest.fixture
def restored_isa() -> Iterator[None]:
    yield
    C.set_cpu_isa("")


def symbols(file: Path, *options: str) -> list[str]:
    out = subprocess.run(
        ["nm", *options, "--format=posix", str(file)], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[0].partition("@")[0] for line in out.splitlines() if line.split()]


@needs_nm
def test_op_library_uses_only_the_stable_abi() -> None:
    """It uses no Python symbol, and only torch's C functions with a stable ABI."""
    undefined = symbols(native.PACKAGE / native.LIBRARY_NAME, "-D", "--undefined-only")
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert [
        name for name in undefined if re.match(r"_?Py|_ZNK?(2at|3c10|5torch|8pybind11)", name)
    ] == []


@needs_nm
@pytest.mark.skipif(
    not OBJECTS, reason="this checkout has no build directory with the kernels' object files"
)
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name)
def test_instruction_sets_share_no_symbol(path: Path) -> None:
    """If two objects define an inline function, the linker may select one this CPU cannot run."""
    isa = path.name.split(".")[-2]
    defined = symbols(path, "--defined-only", "--extern-only")
    # DW.ref.* points to the C++ library's exception handler and contains no code.
    outside = [
        name
        for name in defined
        if f"{len(isa)}{isa}" not in name and not name.startswith("DW.ref.")
    ]
    assert outside == []


def test_stale_libraries_are_not_loaded(tmp_path: Path) -> None:
    """A stale library would read arguments in an old order."""
    csrc = shutil.copytree(
        ROOT / "csrc",
        tmp_path / "csrc",
        ignore=lambda _, names: [n for n in names if n in ("cuda", "emulator")],
    )
    assert native._why_not_current(csrc) is None
    arguments = csrc / "common" / "attention_arguments.h"
    text = arguments.read_text()
    assert "MaybeTensor, mask," in text
    arguments.write_text(text.replace("MaybeTensor, mask,", "MaybeTensor, other,"))
    assert "rebuild it with make build" in str(native._why_not_current(csrc))
    assert native._why_not_current(tmp_path) is None  # installed: no sources to compare with


def test_every_usable_instruction_set_can_be_chosen(restored_isa: None) -> None:
    usable = C.cpu_isas()
    assert usable[-1] == "generic"
    assert C.cpu_isa() == usable[0]
    for name in usable:
        C.set_cpu_isa(name)
        assert C.cpu_isa() == name


def test_an_unknown_instruction_set_is_refused_with_those_available(restored_isa: None) -> None:
    with pytest.raises(RuntimeError, match=r"is 'mmx'.*available: .*generic"):
        C.set_cpu_isa("mmx")


@pytest.mark.parametrize(
    ("value", "code", "answer"),
    [("generic", 0, "generic"), ("mmx", 1, "PYTRANSFORMER_CPU_ISA is 'mmx'")],
)
def test_environment_selects_the_instruction_set(
    value: str, code: int, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CPU_ISA", value)
    ask = (
        "import torch; from pytransformer.ops._core import native; native.why_not('cpu_isa');"
        " print(torch.ops.pytransformer_C.cpu_isa())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True)
    assert done.returncode == code
    assert answer in done.stdout + done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("pytransformer._C") is None,
    reason="_C was not built (_build_info.json says why)",
)
def test_bindings_agree_with_the_op_library() -> None:
    from pytransformer import _C

    assert _C.usable_isas() == list(C.cpu_isas())
    assert _C.default_isa() == C.cpu_isa()
    info = native.build_info()
    assert info is not None
    # The installer adds it.
    assert _C.build_info() == {name: value for name, value in info.items() if name != "checkout"}
    assert set(_C.built_isas()) >= set(_C.usable_isas())
