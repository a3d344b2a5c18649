# SPDX-License-Identifier: Apache-2.0
"""The workflows name commands, files, extras, sessions and Pythons that the project has."""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytransformer import __version__
from pytransformer.cli import build_parser

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
JOBS = {
    f"{name}-{job}": content
    for name, workflow in WORKFLOWS.items()
    for job, content in workflow["jobs"].items()
}
# Commands that come from elsewhere and name nothing of the project but files.
OTHERS = {"apt-get", "cibuildwheel", "grep"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sessions() -> set[str]:
    """Return the names that `nox -s` accepts, by the constants and functions of noxfile.py."""
    text = read("noxfile.py")
    values = {
        name.lower(): re.findall(r'"([\d.]+)"', listed)
        for name, listed in re.findall(r"^([A-Z]+) = (\(.*\))$", text, re.M)
    }
    ops = itertools.product(values["python"], values["torch"])
    return {
        *re.findall(r"^def (\w+)\(session", text, re.M),
        *(f"ops-{python}(torch='{torch}')" for python, torch in ops),
    }


def commands(job: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the words of every command of a job, once for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        for step in job["steps"]:
            text = step.get("run", "")
            for name, value in zip(matrix, values):
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            yield from (shlex.split(part) for part in re.split(r"&&|\n", text) if part.strip())


def missing(words: list[str]) -> list[str]:
    """Return what the words of a command name and the project lacks."""
    program, *rest = words
    paths = [word for word in words if re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.(py|md)", word)]
    lacking = [path for path in paths if not (ROOT / path).is_file()]
    named: list[str] = []
    known: set[str] = set()
    if program == "make":
        named, known = rest, set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    elif program == "nox":
        named, known = rest[rest.index("-s") + 1 :], sessions()
    elif program == "pytransformer":
        (subparsers,) = (a for a in build_parser()._actions if a.dest == "command")
        named, known = rest[:1], set(subparsers.choices or ())
    elif program == "pip" or "--extras" in rest:
        extras = rest[rest.index("--extras") + 1] if "--extras" in rest else rest[-1]
        found = re.findall(r"\.\[(.*)\]", extras) if program == "pip" else [extras]
        named = [extra for group in found for extra in group.split(",")]
        known = set(PROJECT["project"]["optional-dependencies"])
    elif rest[:1] == ["tests/run_parts.py"]:
        sys.path.insert(0, str(ROOT / "tests"))
        named, known = rest[1:], {part.name for part in importlib.import_module("parts").PARTS}
        del sys.path[0]
    elif program not in OTHERS and not (program.endswith(("python", "python3")) and paths):
        named = [program]
    return lacking + [name for name in named if name not in known]


@pytest.mark.parametrize("job", JOBS)
def test_jobs_name_only_what_the_project_has(job: str) -> None:
    every = list(commands(JOBS[job]))
    assert every or job == "release-publish"
    assert [(words, lacking) for words in every if (lacking := missing(words))] == []


def test_only_publishing_gets_a_token_and_it_needs_every_other_job() -> None:
    allowed = [job for job, content in JOBS.items() if "id-token" in content.get("permissions", {})]
    assert allowed == ["release-publish"]
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    jobs, needed, pending = WORKFLOWS["release"]["jobs"], set(), ["publish"]
    while pending:
        needs = jobs[pending.pop()].get("needs", [])
        pending += [needs] if isinstance(needs, str) else needs
        needed |= set(pending)
    assert needed == jobs.keys() - {"publish"}


def test_every_python_has_a_wheel_for_both_machines() -> None:
    versions = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert f">={versions[0]}" == PROJECT["project"]["requires-python"]
    assert set(versions) == {name[4:8] for name in sessions() if name.startswith("ops-")}
    for job in ("release-build", "release-try"):
        assert JOBS[job]["strategy"]["matrix"]["python"] == versions
    options = PROJECT["tool"]["cibuildwheel"]
    built = [f"cp{version.replace('.', '')}-manylinux_aarch64" for version in versions]
    assert fnmatch.filter(built, options["build"]) == built
    tool = read("bench/tools/wheel.py")
    (left_out,) = re.findall(r"^TORCH = \((.*)\)", tool, re.M)
    for library in re.findall(r'"(.*?)"', left_out):
        assert f"--exclude {library} " in options["repair-wheel-command"]
    assert 'PLATFORM = "2_28"' in tool
    assert 'ARCHS = "sm_80,sm_90a,sm_100,sm_120"' in tool  # docs/install.md


def test_citation_and_changelog_have_the_version() -> None:
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
    assert re.findall(r"^## ([\d.]+) \(", read("CHANGELOG.md"), re.M)[0] == __version__
