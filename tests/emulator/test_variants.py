"""bench/tools/cuda_variants.py: variants of the attention kernels for sm_90a are right too, so that a GPU has only to time them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOL = Path(__file__).resolve().parents[2] / "bench" / "tools" / "cuda_variants.py"


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_variants", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_variants"] = module
    spec.loader.exec_module(module)
    return module


tool = _tool()
WRONG = tool.Variant(
    "a wrong scale", "forward", (64,), "attention/sm90/fwd.cuh", "K::general ? kLog2e : p.scale * kLog2e", "kLog2e"
)
NO_KERNEL = tool.Variant(
    "256: 80 keys with terms", "forward", (256,), tool.CONFIG, "Sm90Tile{256, 64, 2}", "Sm90Tile{256, 80, 2}"
)


def test_a_variant_changes_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(tool.VARIANTS) == len({tool.slug(variant.name) for variant in tool.VARIANTS})
    with pytest.raises(ValueError, match=r"its text is 0 times in attention/sm90/plan.h"):
        tool.check_texts([WRONG._replace(file=tool.PLAN)])
    with pytest.raises(SystemExit):
        tool.main(["--only", "no such variant"])
    assert "no variant's name holds 'no such variant'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == tool.NOTHING_TO_RUN_ON
    assert "needs a GPU of compute capability 9.0; --check needs none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("variant", tool.VARIANTS, ids=lambda v: tool.slug(v.name))
def test_a_variant_is_right(variant: object, builder: ModuleType, tmp_path: Path) -> None:
    found = tool.check(variant, tmp_path)
    assert [f for f in found if not f.startswith("nvcc was not found")] == []


@pytest.mark.slow
def test_a_wrong_variant_is_found(builder: ModuleType, tmp_path: Path) -> None:
    assert any(found.startswith("the emulator: ") for found in tool.check(WRONG, tmp_path))


@pytest.mark.slow
def test_libraries_link(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, up to calling them: of a variant, of one that spills, which is told, and why there is none of one that is none."""
    if reason := tool.module(tool.CSRC / "cuda_build.py").why_not():
        pytest.skip(reason)
    variants = [v for v in tool.VARIANTS if v.name in ("64: three consumers", "64: no turns")]
    for variant in (*variants, NO_KERNEL):
        tool.changed_sources(variant, tmp_path / tool.slug(variant.name))
    monkeypatch.setenv("PYTRANSFORMER_CUDA_SPILLS", "")  # what build() sets is taken back
    monkeypatch.setenv("PYTRANSFORMER_CUDA_ARCHS", "")
    failed = tool.build([*variants, NO_KERNEL], tmp_path)
    assert list(failed) == [NO_KERNEL.name] and "static assertion failed" in failed[NO_KERNEL.name]
    spills = {v.name: any("spill" in line for line in tool.refused(tmp_path / f"{tool.slug(v.name)}.d")) for v in variants}
    assert spills == {v.name: v.spills for v in variants}
    for name in ("", *spills):
        torch.ops.load_library(tmp_path / f"{tool.slug(name)}.so")
        assert hasattr(torch.ops.pytransformer_C, f"{tool.prefix_of(name)}attention_bwd")
