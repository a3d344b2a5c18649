# SPDX-License-Identifier: Apache-2.0
"""Print the sizes of functions and files and the numbers of parameters.

    python bench/tools/sizes.py             # the twenty longest functions
    python bench/tools/sizes.py csrc/cpu    # of a folder

Python is parsed; C++ and CUDA are matched by braces. tests/test_layout.py has the limits and
tests/sizes.json the exceptions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CPP = (".h", ".cpp", ".cuh", ".cu")
NOT_FUNCTIONS = {
    "if",
    "for",
    "while",
    "switch",
    "catch",
    "return",
    "sizeof",
    "decltype",
    "alignas",
    "defined",
    "asm",
    "__attribute__",
}
# Comments, literals and preprocessor lines, whose braces and parentheses do not count.
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^['
    r" \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.S | re.M,
)
CALL = re.compile(r"(\]|[~\w]+)\s*\(")
# Tokens between a function's parameters and body: qualifiers, return type, initializers.
QUALIFIERS = r"(?:(?:const|noexcept|override|final|mutable|constexpr)\b\s*)*"
INITIALISERS = r"(?::\s*(?:[\w:<>]+\s*(?:\([^;{}]*?\)|\{[^;{}]*\})\s*,?\s*)+)?"
BETWEEN = re.compile(rf"\s*{QUALIFIERS}(?:->\s*[\w:<>,&*\s]+?)?{INITIALISERS}\{{")


class Function(NamedTuple):
    name: str
    lines: int
    parameters: int
    kernel: bool  # a GPU kernel


def of_python(source: str) -> Iterator[Function]:
    """Yield every function and method; self, cls and stubs (overloads) do not count."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
        if "overload" in decorators:
            continue
        given = node.args
        names = [
            a.arg
            for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)
            if a.arg not in ("self", "cls", "ctx")
        ]
        kernel = "jit" in decorators
        assert node.end_lineno is not None
        yield Function(
            node.name, node.end_lineno - node.lineno + 1, 0 if kernel else len(names), kernel
        )


def _closing(text: str, start: int, pair: str) -> int:
    """Return the position of the closing bracket for the one at `start`, or -1."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if not depth:
            return at
    return -1


def _parameters(text: str) -> int:
    """Return the number of parameters in the text between parentheses."""
    depth, commas = 0, 0
    for letter in text.replace("->", ""):
        depth += (letter in "([{<") - (letter in ")]}>")
        commas += letter == "," and depth == 0
    return commas + 1 if text.strip() and text.strip() != "void" else 0


def of_cpp(source: str) -> Iterator[Function]:
    """Yield every function with a body; lambdas have the name `lambda`."""
    text = NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)
    for found in CALL.finditer(text):
        name = found.group(1)
        if name in NOT_FUNCTIONS:
            continue
        opened = found.end() - 1
        closed = _closing(text, opened, "()")
        body = BETWEEN.match(text, closed + 1) if closed > 0 else None
        if body is None:
            continue
        end = _closing(text, body.end() - 1, "{}")
        if end < 0:
            continue
        lines = text.count("\n", found.start(), end) + 1
        before = text[max(text.rfind(mark, 0, found.start()) for mark in ";}{") + 1 : found.start()]
        kernel = "__global__" in before
        yield Function(
            "lambda" if name == "]" else name,
            lines,
            0 if kernel else _parameters(text[opened + 1 : closed]),
            kernel,
        )


def functions(path: Path) -> Iterator[Function]:
    source = path.read_text(encoding="utf-8")
    return of_python(source) if path.suffix == ".py" else of_cpp(source)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])
    paths = [
        path
        for path in root.rglob("*")
        if path.suffix in (".py", *CPP) and not {".venv", "build"} & set(path.parts)
    ]
    found = sorted(
        ((f, path) for path in paths for f in functions(path)), key=lambda pair: -pair[0].lines
    )
    for function, path in found[:20]:
        print(
            f"{function.lines:5} lines {function.parameters:3} parameters  {path} {function.name}"
        )


if __name__ == "__main__":
    main()
