# SPDX-License-Identifier: Apache-2.0
"""Wheel and source distribution in clean environments outside the checkout.

There is no network; torch is the running one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import pytransformer
from pytransformer.ops._core import dispatch

ROOT = Path(__file__).resolve().parent.parent
SMOKE = """
import sys, torch, pytransformer as pt, pytransformer.kernels
assert pt.__file__.startswith(sys.prefix), pt.__file__
assert pytransformer.kernels.__file__.startswith(sys.prefix)
q = torch.randn(2, 4, 64, 32, requires_grad=True)
out = pt.attention(q, q, q, causal="top_left", backend=sys.argv[1])
out.sum().backward()
expected = pt.reference.attention(q.detach(), q.detach(), q.detach(), causal="top_left")
torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
assert q.grad.isfinite().all()
"""

building = pytest.mark.skipif(
    any(
        subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode
        for name in ("pip", "setuptools")
    ),
    reason="pip and setuptools are not installed here",
)


# The test run selects the targets, because compiling all of them takes minutes.
KEPT = ("PYTRANSFORMER_CPU_ISAS", "PYTRANSFORMER_CUDA_ARCHS")


def call(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command without PYTHONPATH and our variables except KEPT; return its output."""
    ours = {k for k in os.environ if k == "PYTHONPATH" or k.startswith("PYTRANSFORMER_")} - {*KEPT}
    clean = {k: v for k, v in os.environ.items() if k not in ours} | environment
    clean |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "MAX_JOBS": "2"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def build_wheel(source: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Return the wheel and the build output; the checkout reuses compiled files."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        source,
    ]
    output = call(*pip, cwd=out.parent, **environment)
    (wheel,) = out.glob("*.whl")
    return wheel, output


def install(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a new environment with the wheel, and torch through a .pth file."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    python = folder / "bin" / "python"
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        wheel,
        cwd=folder.parent,
    )
    return python


@building
def test_wheel_with_native_code(tmp_path: Path) -> None:
    wheel, _ = build_wheel(ROOT, tmp_path / "wheel", PYTRANSFORMER_CPU="1")
    assert "linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"pytransformer"}
    assert {
        "pytransformer/libpytransformer_cpu.so",
        "pytransformer/_build_info.json",
        "pytransformer/kernels/__init__.py",
    } <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    python = install(wheel, tmp_path / "environment")
    call(python, "-c", SMOKE, "cpu", cwd=tmp_path)
    assert "cpu" in call(python, "-m", "pytransformer", "doctor", cwd=tmp_path)
    assert "cpu" in call(python.with_name("pytransformer"), "doctor", cwd=tmp_path)


@building
def test_wheel_without_a_compiler(tmp_path: Path) -> None:
    wheel, output = build_wheel(ROOT, tmp_path / "wheel", CXX="/nonexistent/c++")
    assert wheel.name.endswith("py3-none-any.whl")
    assert "CPU KERNELS ARE NOT BUILT: /nonexistent/c++ cannot be run" in output
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    python = install(wheel, tmp_path / "environment")
    call(python, "-c", SMOKE, "reference", cwd=tmp_path)
    assert "/nonexistent/c++ cannot be run" in call(
        python, "-m", "pytransformer", "doctor", cwd=tmp_path
    )
    unbuilt_checkout_raises(python, tmp_path / "clone")


def unbuilt_checkout_raises(python: Path, clone: Path) -> None:
    """Importing unbuilt sources beside an installed package raises and names both folders."""
    left_out = shutil.ignore_patterns("_build_info.json", "*.so", "__pycache__")
    shutil.copytree(ROOT / "pytransformer", clone / "pytransformer", ignore=left_out)
    command = [python, "-c", "import pytransformer"]
    unsafe = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    done = subprocess.run(command, cwd=clone, env=unsafe, capture_output=True, text=True)
    site = call(
        python, "-c", "import pytransformer; print(pytransformer.__path__[0])", cwd=clone.parent
    ).strip()
    assert (
        done.returncode
        and f"imported from {clone / 'pytransformer'}, " in done.stderr
        and f"installed in {site};" in done.stderr
    )
    subprocess.run(command, cwd=clone, env=unsafe | {"PYTHONSAFEPATH": "1"}, check=True)


@building
def test_forced_targets_that_cannot_be_built_fail(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError,
        match=r"PYTRANSFORMER_CPU=1, but it cannot be built: .*/nonexistent/c\+\+ cannot be run",
    ):
        build_wheel(ROOT, tmp_path / "wheel", CXX="/nonexistent/c++", PYTRANSFORMER_CPU="1")


@building
def test_one_wheel_for_every_python(tmp_path: Path) -> None:
    wheel, _ = build_wheel(ROOT, tmp_path / "wheel", PYTRANSFORMER_BINDINGS="0")
    assert "-py3-none-linux" in wheel.name
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert set(libraries) - {"pytransformer/libpytransformer_cuda.so"} == {
        "pytransformer/libpytransformer_cpu.so"
    }


def source_distribution(out: Path) -> Path:
    call(
        sys.executable,
        "setup.py",
        "-q",
        "sdist",
        "-d",
        out,
        cwd=ROOT,
        PYTHONSAFEPATH="1",
        PYTRANSFORMER_CPU="0",
    )
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        # The filter came with 3.10.12 and 3.11.4; this test created the archive itself.
        tar.extractall(out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return out / archive.name.removesuffix(".tar.gz")


@building
def test_source_distribution_is_complete(tmp_path: Path) -> None:
    """It has every source and builds, here without native code; the slow test compiles it."""
    source = source_distribution(tmp_path / "sdist")

    def listing(root: Path) -> set[str]:
        expected = [
            p
            for folder in ("csrc", "kernels", "pytransformer", "tests")
            for p in (root / folder).rglob("*")
            if p.is_file()
        ]
        return {
            str(p.relative_to(root))
            for p in expected
            if p.suffix not in (".so", ".pyc", ".new") and p.name != "_build_info.json"
        }

    assert listing(source) == listing(ROOT)
    wheel, _ = build_wheel(source, tmp_path / "wheel", PYTRANSFORMER_CPU="0")
    call(install(wheel, tmp_path / "environment"), "-c", SMOKE, "reference", cwd=tmp_path)


def description(source: Path, folder: Path) -> str:
    """Return the package's description for an index, from the metadata of a source tree."""
    folder.mkdir()
    setup = ("setup.py", "-q", "egg_info", "-e", folder)
    call(sys.executable, *setup, cwd=source, PYTHONSAFEPATH="1", PYTRANSFORMER_CPU="0")
    (metadata,) = folder.glob("*.egg-info/PKG-INFO")
    return metadata.read_text(encoding="utf-8").partition("\n\n")[2]


@building
def test_description_has_absolute_links_or_none(tmp_path: Path) -> None:
    """An index shows README without the repository; [project.urls] names the repository."""
    source = source_distribution(tmp_path / "sdist")
    with (source / "README.md").open("a", encoding="utf-8") as file:
        file.write("\n```python\nrules[0](call)\n```\n")
    readme = (source / "README.md").read_text(encoding="utf-8")
    link = re.compile(r"\[([^]]*[^]\d][^]]*)\]\((\w[^)]*)\)")  # no index of code
    text = description(source, tmp_path / "without")
    assert text.strip() == link.sub(r"\1", readme).strip()
    with (source / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('[project.urls]\nRepository = "https://host.invalid/name"\n')
    text = description(source, tmp_path / "with")
    base = f"https://host.invalid/name/blob/v{pytransformer.__version__}/"
    targets = [target for _, target in link.findall(text)]
    assert len(targets) > 20
    assert all(target.startswith(base) for target in targets)
    assert all((ROOT / target.removeprefix(base)).exists() for target in targets)
    assert link.sub(r"\1", text) == link.sub(r"\1", readme)


@building
@pytest.mark.slow
def test_source_distribution_compiles(tmp_path: Path) -> None:
    """Compile for one CPU and one GPU target only; all targets took 26 minutes on two cores."""
    few = {"PYTRANSFORMER_CPU_ISAS": "native", "PYTRANSFORMER_CUDA_ARCHS": "sm_90a"}
    wheel, _ = build_wheel(
        source_distribution(tmp_path / "sdist"), tmp_path / "wheel", PYTRANSFORMER_CPU="1", **few
    )
    call(install(wheel, tmp_path / "environment"), "-c", SMOKE, "cpu", cwd=tmp_path)


@building
def test_source_install_builds_for_its_machine(tmp_path: Path) -> None:
    """The build has one instruction set besides generic, and no CUDA without a GPU.

    The output must name the option that changes this.
    """
    ask = "import json, native_build as b; p = b.make_plan('1'); print(json.dumps(p.build_info()))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTRANSFORMER_")} | {
        "PYTHONPATH": str(ROOT / "csrc")
    }
    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    info = json.loads(done.stdout)
    assert len(info["cpu"]["isas"]) <= 2 and info["cpu"]["isas"][-1] == "generic"
    if not shutil.which("nvidia-smi"):
        assert not info["cuda"]["built"]
        if shutil.which("nvcc"):
            assert (
                "nvidia-smi shows no GPU to build for; PYTRANSFORMER_CUDA_ARCHS names"
                in info["cuda"]["reason"]
            )


def test_torch_is_found_outside_site_packages() -> None:
    """-S drops site-packages, like a build environment that hides installed packages."""
    ask = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'csrc')!r}); import native_build;"
        " print(native_build.find_torch())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).resolve() == Path(torch.__file__).resolve().parent


LOAD = """
import torch
from pytransformer.ops._core import dispatch, verification
torch.cuda.get_device_capability = lambda *_: (9, 0)
print("rows", len(dispatch.preferences()["sm_90"]))
names = verification.shipped_names(torch.device("cuda", 0))
print("verified", sorted({(op, backend) for op, backend, _ in names}))
"""


@building
def test_gpu_results_are_installed(tmp_path: Path) -> None:
    """Results belong to the compiled sources; a build of others drops them."""
    source = source_distribution(tmp_path / "sdist")
    wheel, _ = build_wheel(source, tmp_path / "wheel", PYTRANSFORMER_CPU="0")
    python = install(wheel, tmp_path / "environment")
    found = call(python, "-c", LOAD, cwd=tmp_path)
    assert "('rotary', 'cuda')" in found and "('layer_norm', 'cuda')" in found
    assert f"rows {len(dispatch.preferences()['sm_90'])}\n" in found
    (package,) = tmp_path.glob("environment/lib/*/site-packages/pytransformer")
    info = json.loads((package / "_build_info.json").read_text())
    info["cuda_sources"]["rotary"] = "another"
    (package / "_build_info.json").write_text(json.dumps(info))
    found = call(python, "-c", LOAD, cwd=tmp_path)
    assert "('rotary', 'cuda')" not in found and "('layer_norm', 'cuda')" in found
