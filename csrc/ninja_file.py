# SPDX-License-Identifier: Apache-2.0
"""Write build.ninja for the native libraries: rules and build statements as text."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import cuda_build
import fast_path_build
import manylinux


class NinjaFile:
    """Text of build.ninja.

    An object depends on its source, its compiler-listed headers and its command.
    """

    def __init__(self, csrc: Path, compiler: list[str], cuda: bool) -> None:
        self.csrc = csrc
        self.lines = [
            "ninja_required_version = 1.5",
            "rule cxx",
            f"  command = {shlex.join(compiler)} $flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $label",
            "rule link",
            f"  command = {manylinux.rule(f'{shlex.join(compiler)} -shared $in $flags')}",
            "  description = link $out",
            *fast_path_build.rules(compiler),
        ]
        if cuda:
            nvcc = shlex.quote(cuda_build.find_nvcc() or "")
            checked = shlex.join([sys.executable, str(csrc / "cuda_build.py")])
            self.lines += [
                "rule nvcc",
                f"  command = {checked} $out $out.log {nvcc} $flags -MD -MF $out.d -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = compile $label",
                "rule nvcc_link",
                (
                    f"  command = {checked} $out $out.log"
                    f" {manylinux.rule(f'{nvcc} -shared -cudart=static $in $flags')}"
                ),
                "  description = link $out",
            ]

    @staticmethod
    def _escape(text: str, extra: str = "") -> str:
        return re.sub(rf"([${extra}])", r"$\1", text)

    def _build(
        self, rule: str, output: str, inputs: list[str], flags: list[str], label: str
    ) -> str:
        paths = " ".join(self._escape(path, ": ") for path in inputs)
        self.lines += [
            f"build {output}: {rule} {paths}",
            f"  flags = {self._escape(shlex.join(flags))}",
            f"  label = {label}",
        ]
        return output

    def compile(self, source: Path, flags: list[str], variant: str = "", rule: str = "cxx") -> str:
        name = source.relative_to(self.csrc).as_posix()
        output = f"{name}{variant and '.' + variant}.o"
        return self._build(
            rule, output, [str(source)], flags, f"{name} {variant and f'({variant})'}".rstrip()
        )

    def compile_cuda(self, name: str, source: Path, flags: list[str]) -> str:
        return self._build("nvcc", f"{name}.o", [str(source)], flags, name)

    def link(self, output: str, objects: list[str], flags: list[str], rule: str = "link") -> None:
        self._build(rule, output, objects, flags, output)

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"
