# SPDX-License-Identifier: Apache-2.0
"""Build the C++ fast path: a Python module against torch's C++ API, for the torch and the Python of the build.

Everything else goes through LibTorch's stable ABI, which has no autograd. So this module is optional, is built only where the headers
are, and names in ``_build_info.json`` what it is for: ops/_core/fast_path.py loads it into no other torch.
"""

from __future__ import annotations

import re
import shlex
import sysconfig
from pathlib import Path

import interface
import manylinux

SOURCE = "fast_path/unit.cpp"
MODULE = "_fast_path" + sysconfig.get_config_var("EXT_SUFFIX")
FLAGS = ["-std=c++20", "-O2"]  # torch's headers want C++20 from 2.14 on
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")


def why_not(torch: Path) -> str | None:
    """Why the module cannot be compiled against this torch and for this Python, or None."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return f"Python.h is not in {sysconfig.get_paths()['include']}: install Python's headers"
    for part in ("include/torch/csrc/autograd/python_variable.h", "lib/libtorch_python.so"):
        if not (torch / part).exists():
            return f"torch at {torch} has no {part}"
    return None


def stamp(torch: Path) -> dict[str, str]:
    """What the module is for: its file, torch's version and commit, and the sources it is made of."""
    names = ("__version__", "git_version")
    found = re.findall(rf"^({'|'.join(names)})(?:: str)? = '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    said = dict(found)
    torch_is, commit = (said.get(name, "unknown") for name in names)
    return {"module": MODULE, "torch": torch_is, "git_version": commit, "sources": interface.digest(part="fast_path")}


def compile_flags(torch: Path) -> list[str]:
    paths = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    # Headers of another torch in the same place are another compilation, though system headers are no dependencies.
    versions = f'-DPT_BUILT_FOR="{" ".join(stamp(torch).values())}"'
    return [*FLAGS, versions, *(option for path in paths for option in ("-isystem", str(path)))]


def link_flags(torch: Path) -> list[str]:
    return ["-L", str(torch / "lib"), *(f"-l{name}" for name in LIBRARIES)]


def rules(compiler: list[str]) -> list[str]:
    """Ninja's rules for the two steps, which leave their messages in files: a failure is a reason, not the end of the build."""
    command = shlex.join(compiler)
    steps = {
        "fast_path": f"{command} $flags -MMD -MF $out.d -c $in -o $out",
        "fast_path_link": manylinux.rule(f"{command} -shared $in $flags"),
    }
    lines = []
    for name, step in steps.items():
        logged = f"rm -f $out && {step} > $out.txt 2>&1 || (cat $out.txt; exit 1)"
        lines += [f"rule {name}", f"  command = {logged}", f"  description = {name} $out"]
    return [*lines[:2], "  depfile = $out.d", "  deps = gcc", *lines[2:]]


def failure(directory: Path) -> str | None:
    """The first complaint about the step that failed in a build directory: it left messages and no output. None if none did."""
    for log in (*directory.glob("fast_path/*.txt"), *directory.glob("_fast_path*.txt")):
        if not log.with_suffix("").exists():
            lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
            telling = [line for line in lines if re.search(r"\b(error|undefined|cannot find)\b", line)]
            return f"its compilation fails: {(telling or lines[-1:] or ['no message'])[0]}"
    return None
