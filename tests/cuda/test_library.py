# SPDX-License-Identifier: Apache-2.0
"""The CUDA library without a GPU: it loads and gives the reason why it cannot run; its build."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import native

needs_library = pytest.mark.skipif(
    (why := cuda_library.why_not_loaded("layer_norm_fwd")) is not None, reason=str(why)
)
CSRC = Path(__file__).resolve().parents[2] / "csrc"


@needs_library
def test_library_loads_and_registers_its_ops() -> None:
    for op in ("layer_norm_fwd", "layer_norm_bwd", "rotary_fwd", "rotary_bwd", "append_kv"):
        assert cuda_library.why_not_loaded(op) is None
        schema = getattr(torch.ops.pytransformer_C, f"cuda_{op}").default._schema
        assert [a.name for a in schema.arguments][-2:] == ["device", "stream"]
    assert "has no op cuda_nothing" in str(cuda_library.why_not_loaded("nothing"))


@needs_library
def test_library_uses_only_the_stable_abi() -> None:
    """It links no Python symbol, only torch's stable C functions, and no other CUDA library."""
    out = subprocess.run(
        ["nm", "-D", "--undefined-only", native.PACKAGE / cuda_library.LIBRARY_NAME],
        capture_output=True,
        text=True,
    )
    undefined = [line.split()[-1].partition("@")[0] for line in out.stdout.splitlines()]
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert [
        name
        for name in undefined
        if re.match(r"_?Py|_ZNK?(2at|3c10|5torch|8pybind11)|cuda[A-Z]|cu[A-Z]", name)
    ] == []


@needs_library
def test_doctor_lists_the_cuda_library() -> None:
    """The entry has architectures, kernels and the reason why they do not run here."""
    from pytransformer.cli import doctor

    report = doctor.cuda()
    assert (
        report["loaded"]
        and report["archs"]
        and {"layer_norm_fwd", "layer_norm_bwd"} <= set(report["ops"])
    )
    assert (
        torch.cuda.is_available() or "GPU" in report["why_not"] or "CPU only" in report["why_not"]
    )


def test_cpu_tensors_are_declined() -> None:
    """A decline is no fallback: a CUDA kernel never runs on CPU tensors."""
    reason = pt.explain("layer_norm", torch.zeros(1, 8), 8).reasons["cuda"]
    assert reason is not None and reason.startswith("runs on CUDA devices")
    with pytest.raises(pt.BackendError, match="runs on CUDA devices"):
        pt.layer_norm(torch.zeros(1, 8), 8, backend="cuda")


def test_kernels_include_no_torch_header() -> None:
    for path in (
        *CSRC.glob("cuda/**/*.cuh"),
        *CSRC.glob("cuda/**/*.cu"),
        *CSRC.glob("cuda/ptx/*"),
        *CSRC.glob("cuda/tile/*"),
    ):
        assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


@pytest.mark.parametrize(
    ("capability", "archs", "reason"),
    [
        ((7, 5), ["sm_80"], "needs a GPU of compute capability 8.0"),
        ((8, 0), ["sm_80"], None),
        ((8, 9), ["sm_80"], None),
        ((8, 0), ["sm_90a"], "was built for sm_90a, and this GPU has compute capability 8.0"),
        ((9, 0), ["sm_80", "sm_90a", "sm_120"], None),
        ((9, 0), ["sm_90a"], None),
        ((10, 0), ["sm_90a"], "was built for sm_90a"),
        ((10, 0), ["sm_80", "sm_90a", "sm_120"], None),  # from PTX
        ((12, 0), ["sm_120"], None),
        ((12, 1), ["sm_80", "sm_120"], None),
        ((9, 0), ["sm_120"], "was built for sm_120"),
        ((9, 0), [], "was built for no architecture"),
    ],
)
def test_build_serves_compatible_gpus(
    capability: tuple[int, int], archs: list[str], reason: str | None
) -> None:
    found = cuda_library.why_not_capability(capability, archs)
    assert found is None if reason is None else found is not None and reason in found


def test_build_options_select_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("cuda_build", CSRC / "cuda_build.py")
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setenv("PYTRANSFORMER_CUDA_ARCHS", "sm_90a, sm_80")
    assert build.archs() == ["sm_90a", "sm_80"]
    hopper, portable = (
        "-gencode=arch=compute_90a,code=[sm_90a]",
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    )
    assert build.gencode() == [hopper, portable]
    assert {hopper, portable, "-DPT_BUILT_SM90A"} < set(
        build.flags(Path("attention/sm80/fwd_bf16.cu"))
    )
    only = build.flags(Path("attention/sm90/fwd_bf16.cu"))
    assert hopper in only and portable not in only
    monkeypatch.setenv(
        "PYTRANSFORMER_CUDA_ARCHS",
        "sm_80",
        # Its kernels are empty there and never selected.
    )
    only = build.flags(Path("attention/sm90/fwd_bf16.cu"))
    assert portable in only and "-DPT_BUILT_SM90A" not in only
    monkeypatch.setenv("PYTRANSFORMER_CUDA_ARCHS", "hopper")
    with pytest.raises(
        ValueError, match="names hopper; expected all, native or names such as sm_80"
    ):
        build.archs()
    monkeypatch.setenv("PYTRANSFORMER_CUDA_ARCHS", "all")
    assert build.archs() == list(build.ARCHS)
    assert build.gencode()[0] == "-gencode=arch=compute_80,code=[sm_80,compute_80]"
    monkeypatch.delenv("PYTRANSFORMER_CUDA_ARCHS")
    monkeypatch.setattr(
        build,
        "native_archs",
        lambda: ["sm_90a"],
        # The default is the machine's architecture.
    )
    assert build.archs() == ["sm_90a"]
    monkeypatch.setattr(build, "native_archs", list)
    assert build.find_nvcc() is None or "nvidia-smi shows no GPU" in (build.why_not() or "")


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (
            (
                "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions"
                " are serialized due to ..."
            ),
            True,
        ),
        ("    40 bytes stack frame, 40 bytes spill stores, 48 bytes spill loads", True),
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", False),
        ("ptxas info    : Used 128 registers, used 1 barriers", False),
    ],
)
def test_build_fails_on_ptxas_performance_remarks(
    message: str, refused: bool, tmp_path: Path
) -> None:
    """The compiler exits with 0.

    The object is deleted, so the next build tries again.
    """
    compiler = ["sh", "-c", 'touch "$0"; echo "$1"', tmp_path / "k.o", message]
    command = [
        sys.executable,
        CSRC / "cuda_build.py",
        tmp_path / "k.o",
        tmp_path / "k.log",
        *compiler,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == int(refused) and (tmp_path / "k.o").exists() != refused
    assert message.strip() in (tmp_path / "k.log").read_text()
    environment = {**os.environ, "PYTRANSFORMER_CUDA_SPILLS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert (
        done.returncode == 0 and (tmp_path / "k.o").exists() and (message in done.stderr) == refused
    )
