# SPDX-License-Identifier: Apache-2.0
"""Build the C++ fast path: a Python module against torch's C++ API.

All other libraries use LibTorch's stable ABI, which has no autograd. So this module serves only
the torch and Python of the build. It is optional and is built only if the headers exist.
``_build_info.json`` names its torch: ops/_core/fast_path.py loads it into no other.
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
FLAGS = ["-std=c++20", "-O2"]  # torch's headers require C++20 from 2.14 on
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")


def why_not(torch: Path) -> str | None:
    """Return why the module cannot be compiled against this torch and Python, or None."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return f"Python.h is not in {sysconfig.get_paths()['include']}: install Python's headers"
    for part in ("include/torch/csrc/autograd/python_variable.h", "lib/libtorch_python.so"):
        if not (torch / part).exists():
            return f"torch at {torch} has no {part}"
    return None


def stamp(torch: Path) -> dict[str, str]:
    """Return the module's file name, torch's version and commit, and the digest of the sources."""
    names = ("__version__", "git_version")
    found = re.findall(
        rf"^({'|'.join(names)})(?:: str)? = '([^']+)'",
        (torch / "version.py").read_text(),
        re.MULTILINE,
    )
    said = dict(found)
    torch_is, commit = (said.get(name, "unknown") for name in names)
    return {
        "module": MODULE,
        "torch": torch_is,
        "git_version": commit,
        "sources": interface.digest(part="fast_path"),
    }


def compile_flags(torch: Path) -> list[str]:
    paths = (
        torch / "include",
        torch / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    )
    # Put torch's version into the command, because system headers are no dependencies: another
    # torch in the same directory must recompile.
    versions = f'-DPT_BUILT_FOR="{" ".join(stamp(torch).values())}"'
    return [*FLAGS, versions, *(option for path in paths for option in ("-isystem", str(path)))]


def link_flags(torch: Path) -> list[str]:
    return ["-L", str(torch / "lib"), *(f"-l{name}" for name in LIBRARIES)]


def rules(compiler: list[str]) -> list[str]:
    """Return ninja's rules for the two steps, which write their messages to files.

    A failure becomes a reason for leaving the part out and does not stop the build.
    """
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
    """Return the first error of the step that failed in a build directory, or None.

    A failed step has messages and no output.
    """
    for log in (*directory.glob("fast_path/*.txt"), *directory.glob("_fast_path*.txt")):
        if not log.with_suffix("").exists():
            lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
            telling = [
                line for line in lines if re.search(r"\b(error|undefined|cannot find)\b", line)
            ]
            return f"its compilation fails: {(telling or lines[-1:] or ['no message'])[0]}"
    return None
