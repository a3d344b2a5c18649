# SPDX-License-Identifier: Apache-2.0
"""Rules of the tree: op families per backend, small files, torch headers in bindings only."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytransformer.ops._core.registry import OPS

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"build", "dist", "results", "__pycache__"}  # plus dot names
FAMILIES = dict.fromkeys(op.family for op in OPS.values())
EVERY_OP_HAS = (
    "pytransformer/ops/{}.py",
    "pytransformer/reference/_{}.py",
    "docs/ops/{}.md",
    "tests/ops/test_{}*.py",
)
A_BACKEND_HAS = {
    "reference": (),
    "torch": ("pytransformer/ops/_backends/torch/{}.py",),
    "cpu": ("csrc/cpu/{0}/problem.h", "csrc/cpu/{0}/{0}.cpp", "csrc/cpu/{0}/kernels.cpp"),
    "triton": ("kernels/{}/configs.py", "kernels/{}/fwd.py", "kernels/{}/bwd.py"),
    "cuda": ("csrc/cuda/{}/**/fwd*.cuh", "csrc/cuda/{}/**/bwd*.cuh"),
}
LIMITS = {"lines of a function": 80, "parameters": 12, "lines of a file": 800}
KERNEL_LINES = 150
_spec = importlib.util.spec_from_file_location("sizes", ROOT / "bench" / "tools" / "sizes.py")
assert _spec and _spec.loader
sizes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sizes)
TORCH_INCLUDE = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10|pybind11)/")


def files(*suffixes: str) -> Iterator[Path]:
    """Yield the project's files with one of these suffixes, relative to the root."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if (
                path.name in GENERATED
                or path.suffix == ".egg-info"
                or (path.name.startswith(".") and path.name != ".ci")
            ):
                continue
            if path.is_dir():
                pending.append(path)
            elif not suffixes or path.suffix in suffixes:
                yield path.relative_to(ROOT)


def missing(patterns: tuple[str, ...], family: str) -> list[str]:
    expected = [pattern.format(family) for pattern in patterns]
    return [pattern for pattern in expected if not any(ROOT.glob(pattern))]


@pytest.mark.parametrize("family", FAMILIES)
def test_op_family_has_its_files_in_every_backend(family: str) -> None:
    backends = {backend for op in OPS.values() if op.family == family for backend in op.backends}
    expected = EVERY_OP_HAS + tuple(
        pattern for backend in sorted(backends) for pattern in A_BACKEND_HAS[backend]
    )
    assert missing(expected, family) == []


def test_no_kernel_file_without_an_op() -> None:
    found = {path.parent.name for path in ROOT.glob("csrc/cpu/*/kernels.cpp")}
    found |= {path.parent.name for path in ROOT.glob("kernels/*/fwd.py")}
    assert found <= set(FAMILIES)


# Shared files that name an op family, each with its reason; other shared files name none.
NAMES = {
    "bench/tools/demo.py": "attention is what it shows",
    "bench/tools/full_models.py": "attention is what its variants differ in",
    "bench/tools/inspect_kernels.py": "kernels of products and of masks bear no op's name",
    "bench/tools/performance.py": "aims for named cases, some with the name of their op",
    "pytransformer/cli/providers/flex.py": "FlexAttention",
    "tests/support/support/drop_in_table.py": "of drop-in attention",
    "tests/support/support/eager_twin.py": "a module of that name",
    "tests/support/support/paths.py": "the calls that csrc/fast_path takes",
    "tests/support/support/planted_backend.py": "a wrong backend of attention",
    "tests/support/support/verification_support.py": "results about attention",
    "tests/support/support/sweep/compare.py": "of attention in other libraries",
    "tests/support/support/sweep/corrections.py": "of attention in other libraries",
    "tests/support/support/sweep/diffusion.py": "a setting of diffusers bears that name",
    "tests/support/support/way_down.py": "a failing backend of attention",
}


def test_shared_files_name_no_op() -> None:
    """An op's declarations and its family's files, which have its name, define it."""
    words = {*OPS, *FAMILIES}
    found = set()
    for path in files(".py"):
        shared = path.parts[0] == "bench" or path.parts[:2] in {
            ("pytransformer", n) for n in ("testing", "cli", "explain.py", "__init__.py")
        }
        shared = shared or path.parts[:3] in {
            ("pytransformer", "ops", "_core"),
            ("tests", "support", "support"),
        }
        if shared and not any(family in path.stem for family in FAMILIES):
            literals = (
                node.value
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.Constant)
            )
            found |= (
                {str(path)}
                if any(isinstance(text, str) and text in words for text in literals)
                else set()
            )
    assert found == set(NAMES)


def test_every_source_names_its_licence() -> None:
    """The form is machine-readable, https://spdx.dev; an empty file needs none."""
    suffixes = (".py", ".sh", *sizes.CPP)
    texts = {path: (ROOT / path).read_text() for path in files(*suffixes)}
    output = "SPDX-License-Identifier: Apache-2.0"
    assert [
        str(path)
        for path, text in texts.items()
        if text.strip() and output not in "".join(text.splitlines()[:2])
    ] == []


# ---- sizes


def beyond_the_limits() -> dict[str, dict[str, int]]:
    """Return the sizes above LIMITS by kind; the max if functions of a file share a name.

    DESIGN fixes the public functions of ops and their argument checks; raw ops have their schema's
    parameters.
    """
    found: dict[str, dict[str, int]] = {kind: {} for kind in LIMITS}

    def see(kind: str, name: str, size: int, limit: int) -> None:
        if size > limit:
            found[kind][name] = max(size, found[kind].get(name, 0))

    for path in files(".py", *sizes.CPP):
        text = (ROOT / path).read_text()
        fixed = set(re.findall(r"TORCH_BOX\(&(\w+)\)", text))
        if path.parent == Path("pytransformer/ops"):
            fixed |= {*OPS, *(op.prepare.__name__ for op in OPS.values())}
        see("lines of a file", str(path), len(text.splitlines()), LIMITS["lines of a file"])
        for function in sizes.functions(ROOT / path):
            name = f"{path} {function.name}"
            see(
                "lines of a function",
                name,
                function.lines,
                KERNEL_LINES if function.kernel else LIMITS["lines of a function"],
            )
            if function.name not in fixed:
                see("parameters", name, function.parameters, LIMITS["parameters"])
    return found


def test_functions_and_files_are_short() -> None:
    """The exceptions of sizes.json may only shrink, and small ones leave the list."""
    left = json.loads((ROOT / "tests" / "sizes.json").read_text())
    found = beyond_the_limits()
    assert set(left) == set(LIMITS) and all(
        reason for entries in left.values() for _, reason in entries.values()
    )
    for kind, entries in left.items():
        grew = {
            name: size
            for name, size in found[kind].items()
            if size > (entries[name][0] if name in entries else 0)
        }
        assert not grew, (
            f"{kind}: more than {LIMITS[kind]}, or than tests/sizes.json allows: {grew}"
        )
        small = sorted(entries.keys() - found[kind].keys())
        assert not small, (
            f"{kind}: within {LIMITS[kind]} now, take it out of tests/sizes.json: {small}"
        )


PYTHON = """
class A:
    def method(self, a, *, b): return a

@triton.jit
def kernel(a, b): pass

@overload
def both(a): ...
def both(a, b, c):
    def inner(): pass
"""
CPP = """
#define IGNORED(a, b) { if (a) b
namespace pt { template <class T, int N>
inline T plain(const T& a, std::array<T, 2> b) noexcept { // a { in a comment
  if (a) { call("}", [&](int i, int j) -> int { return i; }); }
  return a;
}
__global__ void kernel(Params p) {
}
struct S { S(int a, int b, int c) : x(a), y{b} {} void f(void) const; };
int declared(int a);
}
"""


def test_scanners_detect_functions() -> None:
    python = {f.name: (f.lines, f.parameters, f.kernel) for f in sizes.of_python(PYTHON)}
    assert python == {
        "method": (1, 2, False),
        "kernel": (1, 0, True),
        "both": (2, 3, False),
        "inner": (1, 0, False),
    }
    cpp = {f.name: (f.lines, f.parameters, f.kernel) for f in sizes.of_cpp(CPP)}
    assert cpp == {
        "plain": (4, 2, False),
        "lambda": (1, 2, False),
        "kernel": (2, 0, True),
        "S": (1, 3, False),
    }


# ---- other rules


def test_no_file_puts_the_root_on_the_path() -> None:
    """With the root on sys.path, kernels/ would be importable under another package's name."""
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "__init__.py").exists()
    support = ROOT / "tests" / "support" / "support"
    packages = {path.parent for path in (ROOT / "tests").rglob("__init__.py")}
    assert packages == {support, support / "ops", support / "sweep"}


def test_every_package_folder_is_a_package() -> None:
    """setup.py ships folders with an __init__.py; the wheel would lack a module outside them."""
    sources = [path for path in files(".py") if path.parts[0] in ("pytransformer", "kernels")]
    assert [
        str(path) for path in sources if not (ROOT / path.parent / "__init__.py").exists()
    ] == []


def test_torch_headers_only_in_bindings() -> None:
    """torch's headers slow compilation from a fraction of a second to seconds, per ISA."""
    sources = [
        path
        for path in files(".h", ".cpp", ".cuh", ".cu")
        if TORCH_INCLUDE.search((ROOT / path).read_text())
    ]
    outside = [
        path for path in sources if path.name != "binding.h" and path.parts[1] != "fast_path"
    ]  # the fast path is entirely a binding
    assert [
        str(path) for path in outside if path.suffix != ".cpp" or path.stem.endswith("_kernels")
    ] == []


def test_text_names_no_machine() -> None:
    """Text has no machine's path, no package host, and no name of another distribution."""
    here = Path(__file__).relative_to(ROOT)
    forbidden = re.compile(
        r"/(work|root|opt|home)/\w|pypi\.org|pythonhosted|pip install pytransformer(?!-kernels)"
    )
    found = []
    for path in files(
        ".py", ".md", ".txt", ".toml", ".h", ".cpp", ".cuh", ".cu", ".json", ".in", ".sh", ""
    ):
        lines = (
            (ROOT / path).read_text().splitlines()
            if path != here and path.name != "_build_info.json"
            else []
        )
        found += [
            f"{path}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if forbidden.search(line)
        ]
    assert found == []


def test_no_import_error_is_swallowed() -> None:
    """`except ImportError: pass`, or a broader clause, hides why something is missing."""
    wide = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    found = []
    for path in files(".py"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ExceptHandler) and all(
                isinstance(statement, ast.Pass) for statement in node.body
            ):
                caught = (
                    {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
                    if node.type
                    else wide
                )
                if caught & wide:
                    found.append(f"{path}:{node.lineno}")
    assert found == []
