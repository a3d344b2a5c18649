# SPDX-License-Identifier: Apache-2.0
"""The default backend order on a GPU follows committed measurements; no GPU is needed."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import dispatch, verification
from pytransformer.ops._core.dispatch import Cell, Entry
from pytransformer.ops._core.registry import BACKENDS, OPS
from pytransformer.testing.cases import cases

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
WITHIN = 1.05


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "bench" / "tools" / "preferences.py"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Imitate an H100 for the selection, without the user's results file."""
    monkeypatch.setenv("PYTRANSFORMER_VERIFY", "first")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(verification, "load_file", lambda device: None)
    monkeypatch.setattr(verification, "kernel_sources", current_sources)
    version = verification.shipped()["sm_90"]["triton"]["triton"]
    monkeypatch.setattr(verification, "triton_version", lambda: version)
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget() -> None:
    verification.forget()
    dispatch.arch_of.cache_clear()


def current_sources(backend: str) -> dict[str, str]:
    families = verification.shipped()["sm_90"][backend]["families"]
    return {family: result["sources"] for family, result in families.items()}


def shipped() -> set[str]:
    """Return the op families whose CUDA kernels have a shipped result on an H100."""
    return set(verification.shipped()["sm_90"]["cuda"]["families"])


def order(cell: Cell, deterministic: bool = True) -> list[Entry]:
    """Return the order in which a call of the cell tries backends on the imitated GPU."""
    op, dtype = OPS[cell.op], getattr(torch, cell.dtype)
    size = verification.size_class([torch.empty(1, cell.size, device="meta")])
    how, version = verification.mode(), verification.version[0]
    return dispatch._gpu_order(
        cell.op, op.family, tuple(op.backends), GPU, dtype, size, cell, deterministic, how, version
    )


def test_table_equals_the_committed_results(tool: dict[str, Any]) -> None:
    assert dispatch.PREFERENCES.read_text() == tool["text"]()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "everything", [False, True], ids=["shipped results", "all backends verified"]
)
def test_default_is_the_fastest_verified_backend(
    everything: bool, deterministic: bool, tool: dict[str, Any], gpu: pytest.MonkeyPatch
) -> None:
    """In every committed cell of every GPU, the choice is within 5 % of the fastest contender.

    It has a verification result. PyTorch's result depends on a sequence's neighbors, so it is
    chosen only if ``deterministic=False``.
    """
    if everything:
        gpu.setattr(verification, "is_known", lambda *_: True)
        verification.version[0] += 1
    count, expected, of_torch = 0, 0, 0
    for folder in tool["FOLDERS"].values():
        for (cell, case, shape), times in tool["measured"](folder).items():
            size = verification.size_class([torch.empty(1, cell.size, device="meta")])
            dtype = getattr(torch, cell.dtype)
            expected += everything or OPS[cell.op].family in shipped()
            right = {
                entry: ms
                for entry, ms in times.items()
                if verification.is_known(cell.op, entry[0], GPU, dtype, size)
                and (entry[0] != "torch" or not deterministic)
            }
            if (
                not right and OPS[cell.op].family not in shipped()
            ):  # its sources changed after the GPU run
                continue
            chosen = next(e for e in order(cell, deterministic) if e in times)
            assert chosen in right, (cell, case, shape, chosen)
            assert times[chosen] <= WITHIN * min(right.values()), (cell, case, shape, chosen, right)
            count, of_torch = count + 1, of_torch + (chosen[0] == "torch")
    assert count >= expected >= (45 if everything else 12)
    assert (of_torch > 0) == (everything and not deterministic)


def test_h100_needs_no_check_of_shipped_cuda_kernels(gpu: pytest.MonkeyPatch) -> None:
    """The first backend of an op with a shipped result has one in both directions.

    A call of another op is checked.
    """
    gpu.setattr(verification, "_check_first", lambda *_: "checked")
    for name, op in OPS.items():
        for dtype in ("bfloat16", "float16", "float32"):
            for direction in ("fwd", "bwd"):
                for size in (16, 64, 80, 128, 256, 4096):
                    cell = Cell(
                        name,
                        direction,
                        dtype,
                        "full" if op.family == "attention" else "",
                        size,
                        777,
                    )
                    first, *_ = order(cell)
                    key = (name, first[0], GPU, getattr(torch, dtype))
                    q = torch.empty(1, size, device="meta", dtype=key[3])
                    reason = None if op.family in shipped() else "checked"
                    assert verification.why_not(op, first[0], (q,), key) == reason, (
                        name,
                        dtype,
                        direction,
                        size,
                    )
    a = (torch.empty(1, 64, device="meta"),)
    assert (
        verification.why_not(
            OPS["attention"], "triton", a, ("attention", "triton", GPU, torch.float32)
        )
        == "checked"
    )


def test_unverified_backends_come_last_but_before_the_reference(gpu: pytest.MonkeyPatch) -> None:
    cell = Cell("layer_norm", "fwd", "bfloat16", "", 4096, 16384)
    assert [name for name, _ in order(cell)] == ["triton", "cuda", "cpu", "reference"]
    gpu.setattr(verification, "triton_version", lambda: "another")
    verification.forget()
    assert [name for name, _ in order(cell)] == ["cuda", "triton", "cpu", "reference"]
    float64 = replace(cell, dtype="float64")  # none has a shipped result: each would be checked
    assert [name for name, _ in order(float64)] == ["triton", "cuda", "cpu", "reference"]


def test_every_case_lists_every_backend_once(gpu: pytest.MonkeyPatch) -> None:
    """Each named case, in both directions, without a kernel's name."""
    kinds = set()
    for case in [c for name in OPS for c in cases(name)]:
        args, kwargs = case.make("cpu", torch.float32, seed=1)
        op = OPS[case.op]
        a = op.prepare(*args, **kwargs)[0]
        for direction in ("fwd", "bwd"):
            cell = dispatch.cell_of(op, a, direction)
            plain = [name for name, kernel in order(cell) if kernel is None]
            assert sorted(plain) == sorted(op.backends) and plain[-1] == "reference"
            kinds.add(cell.kind)
    grouped = {kind for group in dispatch.GROUPS for kind in group}
    assert kinds - {""} <= grouped and len(kinds) > 8


def test_nearest_row_decides(gpu: pytest.MonkeyPatch) -> None:
    cell = Cell("attention", "fwd", "bfloat16", "causal", 64, 4096)
    gpu.setattr(verification, "is_known", lambda *_: True)
    verification.version[0] += 1
    fast = ("torch", "cudnn")
    assert order(cell, False)[0] == fast and order(cell)[0] == ("cuda", None)
    for near in (
        replace(cell, length=2048),
        replace(cell, dtype="float16"),
        replace(cell, size=72),
        replace(cell, kind="causal", length=8192),
    ):
        assert order(near, False)[0] == fast, near
    assert (
        order(replace(cell, length=128), False)[0][0] == "cuda"
    )  # too short to hide the host's time
    assert order(replace(cell, op="attention_varlen", kind="packed"))[0][0] == "cuda"
    assert dispatch.measured("sm_120", cell, "attention", True)[0] == ("cuda", None)
    assert dispatch.measured("sm_80", replace(cell, op="no op"), "no op", True) == []


def test_times_within_the_margin_keep_the_order() -> None:
    cell = Cell("attention", "fwd", "bfloat16", "full", 64, 4096)

    def names(**times: float) -> list[str]:
        row = dispatch.Row(cell, {(name, None): ms for name, ms in times.items()})
        return [name for name, _ in row.order()]

    assert names(triton=1.0, cuda=1.02) == ["cuda", "triton"]
    assert names(triton=1.0, cuda=1.04) == ["triton", "cuda"]
    assert names(torch=0.5, triton=1.0, cuda=1.02) == ["torch", "cuda", "triton"]


def test_entries_need_the_kernel_that_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry for one of PyTorch's kernels is skipped if PyTorch would run another."""
    op, q = OPS["attention"], torch.randn(1, 2, 8, 16)
    entries = [("torch", "cudnn"), ("cpu", None), ("torch", None), ("reference", None)]
    monkeypatch.setattr(dispatch, "cpu_order", lambda *_: [])
    monkeypatch.setattr("pytransformer.ops._core.op.ordered", lambda *_: entries)
    a = op.prepare(q, q, q)[0]
    assert op.select(a).name == "cpu"
    entries[0] = ("torch", None)
    assert op.select(a).name == "torch"


def test_cpu_order_is_the_order_of_the_backends() -> None:
    q = torch.randn(1, 2, 8, 16)
    assert list(BACKENDS) == ["cuda", "triton", "cpu", "torch", "reference"]
    assert dispatch.cpu_order(OPS["attention"]) == list(OPS["attention"].backends)
    assert pt.explain("attention", q, q, q).backend == "cpu"
