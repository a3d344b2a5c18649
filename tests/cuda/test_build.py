# SPDX-License-Identifier: Apache-2.0
"""Installs with a failing nvcc: a stub compiler in a tree of a few sources."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# Makes an empty object of every source, but fails for names bad*.
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V{version}"; exit 0 ;;
  *bad*) {death} ;;
esac
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2 ;; -MF) touch "$2" ;; esac
  shift
done
echo | exec g++ -x c++ -shared -fPIC - -o "$out"
"""
ERROR = 'echo "bad.cu(3): error: identifier is undefined"; exit 2'
CRASH = (
    'echo "nvcc error   : ptxas died due to signal 11 (Invalid memory reference)"; kill -SEGV $$'
)
SLOW = (
    'echo "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are'
    ' serialized"'
)


@pytest.fixture
def builder(
    native_tree: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """Return native_build over a tree of one CPU source and one CUDA source, good.cu."""
    sources = {"cpu/nothing.cpp": "int nothing;\n", "cuda/some/good.cu": ""}
    module = native_tree(
        sources, {"CPU_ISAS": "generic", "BINDINGS": "0", "CUDA_ARCHS": "sm_90a", "CUDA": "auto"}
    )
    monkeypatch.setattr(module.cuda_build, "CSRC", tmp_path / "csrc")
    in_tree, text = tmp_path / "csrc" / "cuda_build.py", module._ninja_text
    monkeypatch.setattr(
        module,
        "_ninja_text",
        lambda plan: text(plan).replace(str(in_tree), str(CSRC / "cuda_build.py")),
    )
    return module


def fake_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str = "exit 2", version: str = "13.0.88"
) -> None:
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format(death=death, version=version))
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))


def installed(builder: ModuleType, package: Path) -> tuple[set[str], dict[str, object]]:
    """Return the libraries of an install and its report about CUDA."""
    plan = builder.make_plan("1.0")
    builder.install(plan, builder.build(plan), package)
    information = json.loads((package / "_build_info.json").read_text())
    return {path.name for path in package.glob("*.so")}, information["cuda"]


@pytest.mark.parametrize(
    ("death", "reason"),
    [(ERROR, "identifier is undefined"), (CRASH, "died due to signal 11"), (SLOW, "C7515")],
)
def test_failing_cuda_part_is_left_out(
    death: str, reason: str, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """doctor shows the stored reason; a forced CUDA build fails.

    Once the source compiles, the part is back.
    """
    fake_nvcc(tmp_path, monkeypatch, death)
    bad = tmp_path / "csrc/cuda/some/bad.cu"
    bad.touch()
    libraries, output = installed(builder, tmp_path / "package")
    assert (
        libraries == {"libpytransformer_cpu.so"} and not output["built"] and "archs" not in output
    )
    assert str(output["reason"]).startswith(
        "nvcc 13.0.88 fails on cuda/some/bad.cu: "
    ) and reason in str(output["reason"])
    monkeypatch.setenv("PYTRANSFORMER_CUDA", "1")
    with pytest.raises(
        builder.BuildError, match=f"PYTRANSFORMER_CUDA=1, but it cannot be built: .*{reason}"
    ):
        installed(builder, tmp_path / "package")
    bad.unlink()
    libraries, output = installed(builder, tmp_path / "package")
    assert (
        libraries == {"libpytransformer_cpu.so", "libpytransformer_cuda.so"}
        and output["built"]
        and output["nvcc"] == "13.0.88"
    )


def test_other_failures_are_not_attributed_to_cuda(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, monkeypatch)
    (tmp_path / "csrc/cpu/nothing.cpp").write_text("#error broken\n")
    with pytest.raises(builder.BuildError, match="the native code did not compile"):
        installed(builder, tmp_path / "package")


@pytest.mark.parametrize("version", ["12.8.93", "12.9.86"])
def test_old_nvcc_is_refused_by_name(
    version: str, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check precedes any compilation."""
    fake_nvcc(tmp_path, monkeypatch, version=version)
    assert f"nvcc {version} is too old: expected >= 13.0" in str(
        builder.make_plan("1.0").why_not_cuda
    )
    monkeypatch.setenv("PYTRANSFORMER_CUDA", "1")
    with pytest.raises(builder.BuildError, match=f"nvcc {version} is too old"):
        builder.make_plan("1.0")


def test_generated_sources_instantiate_every_launcher_of_one_dtype(tmp_path: Path) -> None:
    """Every function template of attention/kernels.h, once per dtype, with its parameters."""
    cuda_build = runpy.run_path(str(CSRC / "cuda_build.py"))
    texts = cuda_build["generated"](tmp_path)
    headers = re.findall(r'#include "(.*)"', "".join(texts.values()))
    assert headers and all((CSRC / header).is_file() for header in headers)
    declared = re.findall(
        r"template <class T>\nvoid (\w+)\(([^)]*)\);",
        (CSRC / "cuda" / "attention" / "kernels.h").read_text(),
    )
    halves, dtypes = ("ptx::bf16", "ptx::f16"), ("float", "ptx::bf16", "ptx::f16")
    expected = sorted(
        f"{name}<{dtype}>({', '.join(re.sub(r' ?[a-z_0-9]+$', '', x) for x in types.split(', '))})"
        for name, types in ((name, " ".join(types.split())) for name, types in declared)
        for dtype in (halves if name.startswith("sm90_") else dtypes)
    )
    assert expected
    assert sorted(re.findall(r"template void (.*);", "".join(texts.values()))) == expected


def test_generated_sources_are_compiled(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, monkeypatch)
    (tmp_path / "csrc/cuda/attention").mkdir()
    assert installed(builder, tmp_path / "package")[1]["built"]
    objects = {path.name for path in tmp_path.rglob("*.cu.o")}
    assert {"good.cu.o", "fwd_bf16.cu.o", "bwd_fused_f16.cu.o"} <= objects
