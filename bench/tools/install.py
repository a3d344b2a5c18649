# SPDX-License-Identifier: Apache-2.0
"""Create the development environment .venv and install this checkout, editable and built.

    python3 bench/tools/install.py [--extras test,bench,hf]

An importable torch >= 2.11 of the calling Python is reused instead of downloading one. A repeated
run takes a second or two: packages are reinstalled only if their list changed, and only changed
sources are compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
BUILD_TOOLS = ["setuptools", "wheel", "pybind11", "ninja"]
MIN_PYTHON, MIN_TORCH = (3, 10), (2, 11)


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def run(*command: object) -> None:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONSAFEPATH": "1"}
    if subprocess.run([str(part) for part in command], cwd=ROOT, env=environment).returncode:
        sys.exit(f"install: failed: {' '.join(map(str, command))}")


def callers_torch() -> tuple[Path, str] | None:
    """Return folder and version of a recent torch of the calling Python, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    version = re.search(
        r"^__version__ = '(\d+)\.(\d+)([^']*)'", (package / "version.py").read_text(), re.MULTILINE
    )
    if version is None or (int(version[1]), int(version[2])) < MIN_TORCH:
        return None
    return package.parent, f"{version[1]}.{version[2]}{version[3]}"


def make_environment() -> Path:
    """Create .venv if missing; return the constraints file that fits it."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        sys.exit(
            f"install: run this with the Python that shall own {VENV}, not with that of {VENV}"
            " itself"
        )
    if not PYTHON.exists():
        say(f"creating {VENV} with Python {sys.version.split()[0]}")
        if (
            importlib.util.find_spec("ensurepip") is None
            or importlib.util.find_spec("venv") is None
        ):
            sys.exit(
                f"install: {sys.executable} cannot make virtual environments: install its venv"
                " package (Debian: python3-venv)"
            )
        run(sys.executable, "-m", "venv", VENV)
    site = next(VENV.glob("lib/python3*/site-packages"))
    constraints, reused = ROOT / "constraints.txt", site / "torch-of-the-caller.pth"
    if (torch := callers_torch()) is None:
        reused.unlink(missing_ok=True)
        return constraints
    folder, version = torch
    say(f"using torch {version} of {folder}")
    reused.write_text(f"{folder}\n")
    installed = {"torch": version} | {
        d.name: d.version
        for d in importlib.metadata.distributions(name="triton", path=[str(folder)])
    }
    pins = [
        line
        for line in constraints.read_text().splitlines()
        if line.partition("==")[0] not in installed
    ]
    fitting = VENV / "constraints.txt"
    fitting.write_text(
        "\n".join([*pins, *(f"{name}=={version}" for name, version in installed.items())]) + "\n"
    )
    return fitting


def fingerprint(constraints: Path, extras: str) -> str:
    parts = [
        extras,
        sys.version,
        *(path.read_text() for path in (ROOT / "pyproject.toml", constraints)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def main() -> None:
    if sys.version_info < MIN_PYTHON:
        sys.exit(
            f"install: Python {sys.version.split()[0]} is too old: expected >="
            f" {'.'.join(map(str, MIN_PYTHON))}"
        )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--extras",
        default="test,bench,models,hf,triton",
        help="optional dependencies to install (default: %(default)s)",
    )
    extras = parser.parse_args().extras
    start = time.monotonic()
    constraints = make_environment()
    pip = [PYTHON, "-m", "pip", "install", "-c", constraints]
    stamp = VENV / f"installed-{extras.replace(',', '-')}"
    current = fingerprint(constraints, extras)
    up_to_date = stamp.is_file() and stamp.read_text() == current
    if not up_to_date:
        say("installing torch and the build tools")
        run(*pip, *BUILD_TOOLS, f"torch>={'.'.join(map(str, MIN_TORCH))}")
    say("building the native code")
    run(PYTHON, "setup.py", "-q", "build_ext", "--inplace")
    if not up_to_date:
        say(f"installing pytransformer and what its extras {extras} need: half a minute")
        run(*pip, "-q", "--no-build-isolation", "-e", f".[{extras}]")
        stamp.write_text(current)
    say(f"done in {time.monotonic() - start:.0f} s: {PYTHON}")


if __name__ == "__main__":
    main()
