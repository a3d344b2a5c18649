"""The tree's own rules: one stem per op in every tier that claims it, small files, torch headers only at the edges."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytransformer.ops._core.registry import OPS

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"build", "dist", "results", "__pycache__"}  # and everything whose name starts with a dot, but for .ci
STEMS = {
    "attention": {"attention", "attention_varlen"},
    "layer_norm": {"layer_norm", "rms_norm", "add_norm"},
    "feed_forward": {"feed_forward"},
    "cross_entropy": {"linear_cross_entropy"},
}
EVERY_OP_HAS = ("pytransformer/ops/{}.py", "pytransformer/reference/{}.py", "docs/ops/{}.md", "tests/ops/test_{}*.py")
A_BACKEND_HAS = {
    "reference": (),
    "torch": ("pytransformer/ops/_backends/torch/{}.py",),
    "cpu": ("csrc/cpu/{}.h", "csrc/cpu/{}.cpp", "csrc/cpu/{}_kernels.cpp"),
    "triton": ("kernels/{}/configs.py", "kernels/{}/fwd.py", "kernels/{}/bwd.py"),
    "cuda": ("csrc/cuda/{}/**/fwd*.cuh", "csrc/cuda/{}/**/bwd*.cuh"),
}
MAX_LINES = {".py": 500, ".h": 600, ".cpp": 600, ".cuh": 600, ".cu": 600}
TORCH_INCLUDE = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10|pybind11)/")


def files(*suffixes: str) -> Iterator[Path]:
    """The project's own files with one of these suffixes, relative to the root."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.name in GENERATED or path.suffix == ".egg-info" or (path.name.startswith(".") and path.name != ".ci"):
                continue
            if path.is_dir():
                pending.append(path)
            elif not suffixes or path.suffix in suffixes:
                yield path.relative_to(ROOT)


def missing(patterns: tuple[str, ...], stem: str) -> list[str]:
    wanted = [pattern.format(stem) for pattern in patterns]
    return [pattern for pattern in wanted if not any(ROOT.glob(pattern))]


def test_every_op_belongs_to_a_stem() -> None:
    assert set(OPS) <= set().union(*STEMS.values())


@pytest.mark.parametrize("stem", STEMS)
def test_a_stem_has_its_files_in_every_tier_that_claims_it(stem: str) -> None:
    ops = [OPS[name] for name in STEMS[stem] & set(OPS)]
    assert ops, f"no op of the stem {stem} is registered"
    backends = {backend for op in ops for backend in op.backends}
    wanted = EVERY_OP_HAS + tuple(pattern for backend in sorted(backends) for pattern in A_BACKEND_HAS[backend])
    assert missing(wanted, stem) == []


def test_no_kernel_file_without_an_op() -> None:
    found = {path.name.removesuffix("_kernels.cpp") for path in ROOT.glob("csrc/cpu/*_kernels.cpp")}
    found |= {path.parent.name for path in ROOT.glob("kernels/*/fwd.py")}
    assert found <= set(STEMS)


def test_files_are_short() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in files(*MAX_LINES)}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES[Path(path).suffix]} == {}


def test_nothing_puts_the_root_on_the_path() -> None:
    """With the root on sys.path, kernels/ would be importable by the name of another package."""
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_package_folder_is_a_package() -> None:
    """setup.py ships folders that have an __init__.py; a module in one without would be left out of the wheel."""
    sources = [path for path in files(".py") if path.parts[0] in ("pytransformer", "kernels")]
    assert [str(path) for path in sources if not (ROOT / path.parent / "__init__.py").exists()] == []


def test_torch_headers_only_at_the_edges() -> None:
    """A file with torch's headers compiles in seconds instead of a fraction of one, and inlines nothing of torch per ISA."""
    sources = [path for path in files(".h", ".cpp", ".cuh", ".cu") if TORCH_INCLUDE.search((ROOT / path).read_text())]
    outside = [path for path in sources if path.name != "edge.h" and path.parts[1] != "lane"]  # the lane is an edge as a whole
    assert [str(path) for path in outside if path.suffix != ".cpp" or path.stem.endswith("_kernels")] == []


def test_text_names_no_machine() -> None:
    """No path of one machine, no package host, and never the name that is somebody else's distribution."""
    here = Path(__file__).relative_to(ROOT)
    forbidden = re.compile(r"/(work|root|opt|home)/\w|pypi\.org|pythonhosted|pip install pytransformer(?!-kernels)")
    found = []
    for path in files(".py", ".md", ".txt", ".toml", ".h", ".cpp", ".cuh", ".cu", ".json", ".in", ".sh", ""):
        lines = (ROOT / path).read_text().splitlines() if path != here else []
        found += [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if forbidden.search(line)]
    assert found == []


def test_no_import_error_is_swallowed() -> None:
    """`except ImportError: pass`, or a wider net, hides the reason why something is missing."""
    wide = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    found = []
    for path in files(".py"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(statement, ast.Pass) for statement in node.body):
                caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else wide
                if caught & wide:
                    found.append(f"{path}:{node.lineno}")
    assert found == []
