# SPDX-License-Identifier: Apache-2.0
"""Packages and native code. The metadata is in pyproject.toml, the compiler's work in
csrc/native_build.py."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402  (beside the sources it compiles; never installed)


def version() -> str:
    return ast.literal_eval(
        (ROOT / "pytransformer" / "_version.py").read_text().partition("__version__ = ")[2]
    )


@functools.cache
def plan() -> native_build.Plan:
    made = native_build.make_plan(version())
    print(native_build.describe(made), file=sys.stderr, flush=True)
    return made


def for_index(text: str, address: str | None) -> str:
    """Return README for a package index: links into the repository absolute, or without an address
    only their text."""
    target = rf"[\1]({address}/blob/v{version()}/\2)" if address else r"\1"
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # odd ones are code
    parts[::2] = [
        re.sub(r"\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)", target, part) for part in parts[::2]
    ]
    return "".join(parts)


class Distribution(setuptools.Distribution):
    """Native code or pure Python: the machine decides, so the question is answered only when a
    command asks it."""

    def parse_config_files(self, *args: object, **options: object) -> None:
        super().parse_config_files(*args, **options)
        address = (self.metadata.project_urls or {}).get("Repository")
        self.metadata.long_description = for_index(self.metadata.long_description, address)

    def has_ext_modules(self) -> bool:
        return plan().native


class BuildPy(build_py):
    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(
                self.build_lib, ignore_errors=True
            )  # a module deleted since the last build must not be shipped
        super().run()
        if not plan().native:
            native_build.install(plan(), {}, package_directory(self, in_source=self.editable_mode))


class BuildExt(build_ext):
    """Runs ninja instead of distutils' compiler; --inplace and editable installs put the libraries
    into the source tree."""

    def run(self) -> None:
        files = native_build.build(plan())
        native_build.install(
            plan(), files, package_directory(self, in_source=self.inplace or self.editable_mode)
        )

    def get_outputs(self) -> list[str]:
        directory = package_directory(self, in_source=False)
        return [str(directory / name) for name in (*plan().targets(), native_build.BUILD_INFO)]

    def get_output_mapping(self) -> dict[str, str]:
        if not (self.inplace or self.editable_mode):
            return {}
        source = package_directory(self, in_source=True)
        return {output: str(source / Path(output).name) for output in self.get_outputs()}


def package_directory(command: setuptools.Command, in_source: bool) -> Path:
    return ROOT / "pytransformer" if in_source else Path(command.build_lib) / "pytransformer"


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if (
            plan().native
            and plan().why_not_bindings is not None
            and plan().why_not_fast_path is not None
        ):
            return "py3", "none", platform  # no file in it depends on the Python version
        return python, abi, platform


def packages() -> list[str]:
    """pytransformer and its subpackages; kernels/ is installed as pytransformer.kernels."""
    kernels = [
        "pytransformer.kernels." + name for name in setuptools.find_packages(str(ROOT / "kernels"))
    ]
    return [
        *setuptools.find_packages(str(ROOT), include=["pytransformer", "pytransformer.*"]),
        "pytransformer.kernels",
        *kernels,
    ]


try:
    setuptools.setup(
        distclass=Distribution,
        packages=packages(),
        package_dir={"pytransformer": "pytransformer", "pytransformer.kernels": "kernels"},
        cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "bdist_wheel": BdistWheel},
    )
except native_build.BuildError as error:
    sys.exit(f"error: {error}")
