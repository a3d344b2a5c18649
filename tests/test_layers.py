# SPDX-License-Identifier: Apache-2.0
"""Layers: a file imports only its layer and lower ones, without cycles, in functions too."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, SUPPORT = "pytransformer", "support"
# Imports that break a rule, (importer, imported), with reasons. The list may only shrink.
LEFT: dict[tuple[str, str], str] = {}

# A module's longest matching prefix determines its layer, listed from the bottom. A layer may
# import itself and earlier ones.
LAYERS = {
    "core": (
        "_version",
        "_checkout",
        "_file_lock",
        "_html",
        "_first_calls",
        "_C",
        "console",
        "extras",
        "ops._core",
        "ops._problem",
        "ops.masks",
        "ops.options",
        "reference.philox",
    ),
    "reference": ("reference",),
    "kernels": ("kernels",),
    "ops": ("ops",),
    "distributed": ("distributed",),
    "nn": ("nn",),
    "models": ("models", "viz", "training"),
    "integrations": ("integrations", "compat", "drop_in", "drop_in_nested"),
    "package": ("", "explain", "verify"),  # pytransformer/__init__.py: the users' imports
    "testing": ("testing",),
    "cli": ("cli", "__main__"),
    "support": (SUPPORT,),  # never installed
}
ORDER = list(LAYERS)


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module by its name within the package; kernels/ is pytransformer.kernels.

    The modules of tests/support are beside them, as support.
    """
    found = {}
    folders: dict[Path, tuple[str, ...]] = {
        ROOT / PACKAGE: (),
        ROOT / "kernels": ("kernels",),
        ROOT / "tests" / "support" / SUPPORT: (SUPPORT,),
    }
    for folder, prefix in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, source: str, is_package: bool) -> Iterator[str]:
    """Yield the package's modules imported anywhere in the text, except for type checking only."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in (PACKAGE, SUPPORT):
                    yield alias.name.removeprefix(PACKAGE).lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")
            if node.level:
                own = name.split(".") if name else []
                own = own[: len(own) - node.level + is_package]
                base = [*own, *filter(None, base)]
            elif base[0] not in (PACKAGE, SUPPORT):
                continue
            else:
                base = base[base[0] == PACKAGE :]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in modules() else ".".join(base)


@functools.cache
def graph() -> dict[str, set[str]]:
    return {
        name: {t for t in imports(name, path.read_text(), path.name == "__init__.py") if t != name}
        for name, path in modules().items()
    }


def place_of(module: str) -> tuple[str, str]:
    """Return the layer and the prefix that selects it."""
    fits = {
        prefix: layer
        for layer, prefixes in LAYERS.items()
        for prefix in prefixes
        if not prefix or module == prefix or module.startswith(prefix + ".")
    }
    prefix = max(fits, key=len)
    return fits[prefix], prefix


def upward(edges: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the imports of a higher layer."""
    order = list(LAYERS)
    rank = {
        name: order.index(place_of(name)[0])
        for name in {*edges, *(t for found in edges.values() for t in found)}
    }
    return {(name, t) for name, found in edges.items() for t in found if rank[t] > rank[name]}


def of_packages(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between the prefixes in LAYERS: packages or, in core, single files."""
    found = defaultdict(set)
    for name, targets in edges.items():
        found[place_of(name)[1]] |= {place_of(t)[1] for t in targets} - {place_of(name)[1]}
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node (Tarjan 1972)."""
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


def test_every_module_has_a_layer() -> None:
    """Every prefix is a module too, so that new ones join LAYERS explicitly."""
    placed = {name: place_of(name) for name in modules()}
    assert [n for n, (_, prefix) in placed.items() if not prefix and n] == []
    unused = {p for prefixes in LAYERS.values() for p in prefixes} - {p for _, p in placed.values()}
    assert unused == {"_C"}, "a prefix without a module (_C is built)"


def test_no_import_of_a_layer_above() -> None:
    assert upward(graph()) == LEFT.keys()


def test_the_package_uses_all_of_testing() -> None:
    """A module that only tests need belongs to tests/support, which is not installed."""
    edges = graph() | {
        "testing.kits": graph()["testing.kits"]  # it loads the files of testing/ops
        | {name for name in graph() if name.startswith("testing.ops.")}
    }
    found = {name for name in edges if place_of(name)[0] not in ("testing", SUPPORT)}
    used: set[str] = set()
    while found:
        used |= found
        found = {target for name in found for target in edges[name]} - used
    used |= {"testing", "testing.ops"}  # the packages of the files
    assert [n for n in sorted(edges) if place_of(n)[0] == "testing" and n not in used] == []


def test_files_have_no_import_cycle() -> None:
    assert circles(graph()) == []


def test_packages_have_no_import_cycle() -> None:
    assert circles(of_packages(graph())) == []


@pytest.mark.parametrize(
    ("text", "layer", "circle"),
    [
        ("import torch", 0, 0),
        ("def f():\n    from ..nn.attention import Attention", 1, 1),  # nn imports ops
        ("import pytransformer.models as m", 1, 1),
        ("from support import guarded", 1, 0),
        ("from pytransformer.ops import scaled_dot_product", 0, 1),  # it imports ops.attention
        ("if TYPE_CHECKING:\n    from ..models import Bert", 0, 0),
    ],
)
def test_planted_import_is_detected(text: str, layer: int, circle: int) -> None:
    """One more import in ops/attention.py is detected."""
    name = "ops.attention"
    edges = graph() | {name: graph()[name] | set(imports(name, text, is_package=False))}
    assert len(upward(edges) - LEFT.keys()) == layer
    assert (circles(edges) != []) == circle
