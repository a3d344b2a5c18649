# SPDX-License-Identifier: Apache-2.0
"""layer_norm, rms_norm and add_norm on the emulated backend "cuda", through the public API."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import layer_norm_problems
import pytest
import torch
from run_problems import Share

import pytransformer as pt
from pytransformer.testing.cases import Case, cases
from support.dropout_check import check_norm_starts
from support.guarded import LAYOUTS, place
from support.ops.layer_norm import constant_rows_off_their_bias

FUZZ_CASES, FUZZ_SEED = 100, 21

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


def test_every_path_is_right(share: Share) -> None:
    for problem in share(layer_norm_problems.problems()):
        assert (found := layer_norm_problems.wrong(problem)) == [], f"{problem}: {found}"


def test_random_problems(share: Share) -> None:
    failed = [
        f"case {case}: {problem}\n    {found}"
        for case, problem in share(layer_norm_problems.drawn(FUZZ_SEED, FUZZ_CASES))
        if (found := layer_norm_problems.wrong(problem))
    ]
    assert not failed, "\n".join(failed[:5])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("schedule", [1], indirect=True)
@pytest.mark.parametrize(
    "case", [*cases("layer_norm"), *cases("rms_norm"), *cases("add_norm")], ids=lambda c: c.name
)
def test_case_equals_the_reference(case: Case, schedule: int, dtype: torch.dtype) -> None:
    """The shared named cases are close to the reference and give equal bits in another schedule."""
    args, kwargs = case.make("cpu", dtype, seed=0, requires_grad=True)
    leaves = [
        t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad
    ]

    def run(backend: str) -> list[torch.Tensor]:
        found = getattr(pt, case.op)(*args, **kwargs, backend=backend, strict=True)
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    ours, again, want = run("cuda"), run("cuda"), run("reference")
    for a, b, c in zip(ours, again, want):
        assert torch.equal(a, b)
        error = (a.double() - c.double()).norm() / c.double().norm()
        assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("columns", [64, 300, 1032, 12304])
def test_dropout_mask_equals_the_reference(columns: int) -> None:
    """Forward and backward agree bit for bit in every kernel.

    Rows beyond 32 columns and unaligned rows are included.
    """
    x, seed = torch.full((3, columns), 7.0, requires_grad=True), -(2**40) + 12345
    for p in (0.1, 0.5, 0.999, 1.0):
        streams = [
            pt.add_norm(x, None, None, dropout_p=p, dropout_seed=seed, backend=b)[1]
            for b in ("cuda", "reference")
        ]
        assert torch.equal(*streams)
        grads = [torch.autograd.grad(s, x, torch.ones_like(s))[0] for s in streams]
        assert torch.equal(grads[0], streams[0] / 7) and torch.equal(*grads)


@pytest.mark.parametrize("columns", [33, 264])
def test_slices_of_rows_have_the_dropout_of_the_full_problem(columns: int) -> None:
    check_norm_starts("cuda", columns)


def test_strides_and_alignment_keep_results_within_the_bound() -> None:
    """Layouts of inputs and upstream gradients select 16-byte or single-element accesses."""
    problem = next(p for p in layer_norm_problems.problems() if p.tensors["x"].shape[1] == 96)
    for layout in LAYOUTS:
        laid = {
            n: layout if place(t, layout).shape == t.shape else "contiguous"
            for n, t in problem.tensors.items()
        }
        assert layer_norm_problems.wrong(dataclasses.replace(problem, layouts=laid)) == [], layout


def test_nan_and_inf_do_not_spread() -> None:
    x = torch.randn(40, 72)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    y = pt.layer_norm(x, 72, backend="cuda")
    assert y[[2, 4]].isnan().all() and y[[0, 1, 3, 5]].isfinite().all()
    assert torch.equal(y[17:18], pt.layer_norm(x[17:18], 72, backend="cuda"))


def test_large_mean_loses_no_accuracy() -> None:
    x = 100 + 0.1 * torch.randn(8, 1000)
    for columns in (1000, 999):
        ours = pt.layer_norm(x[:, :columns], columns, backend="cuda").double()
        exact = torch.nn.functional.layer_norm(x[:, :columns].double(), (columns,))
        assert (ours - exact).abs().max() < 2e-6


def test_constant_rows_give_the_bias() -> None:
    assert not constant_rows_off_their_bias("cuda", 768) + constant_rows_off_their_bias("cuda", 999)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4, 8)])
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    dx, dw = torch.autograd.grad(pt.layer_norm(x, shape[-1], w, backend="cuda").sum(), (x, w))
    assert dx.shape == x.shape and torch.equal(dw, torch.zeros_like(w))


def test_memory_order_is_kept() -> None:
    x = torch.randn(7, 5, 40).transpose(0, 1).requires_grad_()
    y = pt.layer_norm(x, 40, backend="cuda")
    (dx,) = torch.autograd.grad(y, x, torch.randn(7, 5, 40).transpose(0, 1))
    assert y.stride() == dx.stride() == x.stride()


def test_unsupported_arguments_give_a_reason() -> None:
    with pytest.raises(pt.BackendError, match="float32, bfloat16 or float16, got x in float64"):
        pt.layer_norm(torch.zeros(2, 8, dtype=torch.float64), 8, backend="cuda")


def test_missing_library_gives_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTRANSFORMER_EMULATE", str(tmp_path / "none.so"))
    with pytest.raises(pt.BackendError, match=r"there is no emulated library .*none\.so"):
        pt.layer_norm(torch.zeros(2, 8), 8, backend="cuda")


def test_binding_checks_shapes() -> None:
    """A caller without the public function gets the kernels' preconditions as errors."""
    from pytransformer.ops._backends.cuda import library as cuda_library

    x, out, rstd = torch.zeros(1, 2, 8), torch.empty(1, 2, 7), torch.empty(2)
    assert cuda_library.why_not("layer_norm_fwd", x.device) is None
    arguments: list[Any] = [
        x,
        None,
        None,
        None,
        None,
        out,
        None,
        None,
        rstd,
        1,
        8,
        0,
        1e-5,
        0.0,
        True,
    ]
    with pytest.raises(RuntimeError, match="out has 14 elements; expected 16"):
        cuda_library.call("layer_norm_fwd", x.device, *arguments)
    arguments[-6:-4] = 3, 8
    with pytest.raises(RuntimeError, match="16 elements are not outer = 3 times rows of 8 columns"):
        cuda_library.call("layer_norm_fwd", x.device, *arguments)
