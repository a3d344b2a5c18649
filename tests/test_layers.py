"""Layers: a file imports its own layer and those below, and no import closes a circle. Imports within functions count."""

from __future__ import annotations

import ast
import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "pytransformer"
LEFT = Path(__file__).with_name("layers_left.json")  # imports that break a rule, each with its reason: the list may only shrink

# The first prefix that fits a module is its layer's. From the bottom: a layer may import those above it in this table.
LAYERS = {
    "core": ("_version", "_first_calls", "console", "ops._core", "ops.masks", "reference.philox", "_build_info", "_C"),
    "reference": ("reference",),
    "kernels": ("kernels",),
    "ops": ("ops", "explain"),
    "nn": ("nn",),
    "models": ("models", "viz", "training"),
    "integrations": ("integrations", "drop_in", "drop_in_nested"),
    "package": ("",),  # pytransformer/__init__.py, which names what users import
    "testing": ("testing",),
    "cli": ("cli", "__main__"),
}
ORDER = list(LAYERS)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its name without the package's own; kernels/ is installed as pytransformer.kernels."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, ()), (ROOT / "kernels", ("kernels",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, source: str, is_package: bool) -> Iterator[str]:
    """The package's modules that the module's text imports anywhere, those for type checking alone left out."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield alias.name.removeprefix(PACKAGE).lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")
            if node.level:
                own = name.split(".") if name else []
                own = own[: len(own) - node.level + is_package]
                base = [*own, *filter(None, base)]
            elif base[0] != PACKAGE:
                continue
            else:
                base = base[1:]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in modules() else ".".join(base)


@functools.cache
def graph() -> dict[str, set[str]]:
    return {
        name: {t for t in imports(name, path.read_text(), path.name == "__init__.py") if t != name}
        for name, path in modules().items()
    }


def layer_of(module: str) -> str:
    fits = {
        prefix: layer
        for layer, prefixes in LAYERS.items()
        for prefix in prefixes
        if not prefix or module == prefix or module.startswith(prefix + ".")
    }
    return fits[max(fits, key=len)]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found
