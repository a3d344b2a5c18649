# SPDX-License-Identifier: Apache-2.0
"""The host side of the CUDA backend without a GPU, against stubs of runtime and driver.

It covers contexts, probe, launches and tensor maps. CUDA's runtime accepts a stub driver for its
version only; beyond that it requires NVIDIA's driver.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytransformer.ops._backends.cuda import library as cuda_library

ROOT = Path(__file__).resolve().parents[2]
PROBED = (
    "import torch; from pytransformer.ops._backends.cuda import library; assert not"
    " library.why_not_loaded('layer_norm_fwd'); print(library._why_not_driver(0))"
)


def test_host_layer_runs_against_stubs(tmp_path: Path) -> None:
    """host_layer.cu has the expectations."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc was not found")
    program = tmp_path / "host_layer"
    flags = [
        "-std=c++17",
        "-arch=sm_80",
        "-cudart=none",
        "--expt-relaxed-constexpr",
        "-diag-suppress",
        "177",
    ]
    flags += ["-I", ROOT / "csrc", "-o", program]
    sources = [Path(__file__).with_name("host_layer.cu"), ROOT / "csrc/cuda/device.cu"]
    subprocess.run(list(map(str, ["nvcc", *flags, *sources])), check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) > 20, (
        "\n".join(line for line in lines if not line.startswith("ok")) + done.stderr
    )


@pytest.mark.skipif(
    (why := cuda_library.why_not_loaded("layer_norm_fwd")) is not None, reason=str(why)
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a driver of its own")
@pytest.mark.parametrize("version", [None, 12040, 0])
def test_old_driver_is_reported(version: int | None, tmp_path: Path) -> None:
    """The built library and its runtime meet a driver that reports only its version."""
    environment = dict(os.environ)
    if version is not None:
        if shutil.which("gcc") is None:
            pytest.skip("gcc was not found")
        source = (
            f"int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}\nint cuInit(unsigned"
            " f) { return 0; }\n"
        )
        source += "int cuGetExportTable(const void **t, const void *id) { return 1; }\n"
        source += (
            "int cuGetProcAddress_v2(const char *n, void **f, int v, unsigned long long g, int"
            " *s) {\n"
        )
        source += (
            '  *f = __builtin_strcmp(n, "cuDriverGetVersion") ? (void *)cuInit : (void'
            " *)cuDriverGetVersion; return 0; }\n"
        )
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-x",
            "c",
            "-",
            "-o",
            str(tmp_path / "libcuda.so.1"),
        ]
        subprocess.run(command, input=source, text=True, check=True)
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROBED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"there is no NVIDIA driver, or one too old for CUDA \d+\.\d+, which", done.stdout
    ), done.stdout


def test_probe_gives_the_reason_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of the backend uses it; ROCm's GPUs are refused before the driver is queried."""
    device, output = torch.device("cuda", 0), "the NVIDIA driver is for CUDA 12.4"
    asked = []

    def driver(index: int) -> str:
        asked.append(index)
        return output

    monkeypatch.setattr(cuda_library, "why_not_loaded", lambda op: None)
    monkeypatch.setattr(cuda_library, "why_not_capability", lambda capability, archs: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(cuda_library, "_why_not_driver", driver)
    cuda_library._why_not_device.cache_clear()
    for op in (
        "layer_norm_fwd",
        "attention_fwd",
        "feed_forward_fwd",
        "cross_entropy_fwd",
        "rotary_fwd",
        "append_kv",
    ):
        assert cuda_library.why_not(op, device) == output
    assert asked == [0]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "needs an NVIDIA GPU, and this torch is built for ROCm 6.4" in str(
        cuda_library.why_not("layer_norm_fwd", device)
    )
    cuda_library._why_not_device.cache_clear()
