# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv on the emulated backend "cuda", through the public API."""

from __future__ import annotations

from typing import Any

import append_problems
import pytest
import rotary_problems
import torch

import pytransformer as pt
from pytransformer.cli.benchmark import check, exact
from pytransformer.cli.providers import Problem, prepare_ours
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._backends.gpu import rotary as gpu_rotary
from pytransformer.testing.cases import Case, cases

FUZZ_CASES, FUZZ_SEED = 12, 31
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


@pytest.mark.parametrize("schedule", [1, pytest.param(2, marks=pytest.mark.slow)], indirect=True)
def test_every_path_is_right(schedule: int) -> None:
    for problem in rotary_problems.problems():
        assert (found := rotary_problems.wrong(problem)) == [], f"{problem}: {found}"


@pytest.mark.parametrize(
    "problem", list(append_problems.problems()), ids=lambda problem: problem.name
)
def test_8_bit_caches_equal_quantize_kv(problem: Any) -> None:
    assert append_problems.wrong(problem) == []


@pytest.mark.parametrize("count", [FUZZ_CASES, pytest.param(300, marks=pytest.mark.slow)])
def test_random_problems(count: int) -> None:
    failed = [
        f"case {case}: {problem}\n    {found}"
        for case, problem in rotary_problems.drawn(FUZZ_SEED, count)
        if (found := rotary_problems.wrong(problem))
    ]
    assert not failed, "\n".join(failed[:5])


@pytest.mark.parametrize("case", [*cases("rotary"), *cases("append_kv")], ids=lambda c: c.name)
def test_case_within_the_bound(case: Case) -> None:
    """Outputs, caches and gradients of the shared cases keep their bits in another schedule."""
    problem = Problem.make(case, BF16, "cpu", seed=0, grad=True)
    grads = check.upstream(problem, seed=1)
    found = check.compute(problem, prepare_ours("cuda", problem), grads)
    assert check.judge(problem, found, exact.solve(problem, grads), peer=False).wrong is None
    again = check.compute(problem, prepare_ours("cuda", problem), grads)
    assert all(
        torch.equal(a, b)
        for a, b in zip(found.values(), again.values())
        if a is not None and b is not None
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [64, 24])
def test_bits_without_a_norm_equal_the_cpu(dims: int, interleaved: bool) -> None:
    """Both round every product but the last, which is fused with the sum.

    Instruction sets without FMA round it too.
    """
    native = pytest.importorskip(
        "pytransformer._C", reason="_C was not built (_build_info.json says why)"
    )
    if native.default_isa() == "generic":
        pytest.skip("the CPU's kernels for no instruction set in particular fuse nothing")
    cos, sin = torch.randn(2, 2, 3, dims)
    for dtype in (torch.float32, BF16):
        x = torch.randn(2, 3, 2, 64, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()
        grad, results = torch.randn_like(x), []
        for backend in ("cuda", "cpu"):
            out = pt.rotary(
                x, cos=cos, sin=sin, dims=dims, interleaved=interleaved, backend=backend
            )
            results.append((out, *torch.autograd.grad(out, x, grad)))
        assert all(
            torch.equal(mine, other) and mine.stride() == x.stride()
            for mine, other in zip(*results)
        )


def test_single_gradients_equal_those_of_all() -> None:
    x, weight, positions = (
        torch.randn(2, 3, 2, 40, requires_grad=True),
        torch.randn(40, requires_grad=True),
        torch.arange(2),
    )
    grad = torch.randn(2, 3, 2, 40)
    together = torch.autograd.grad(
        pt.rotary(x, positions, weight=weight, backend="cuda"), (x, weight), grad
    )
    for i, leaves in enumerate(((x, weight.detach()), (x.detach(), weight))):
        out = pt.rotary(leaves[0], positions, weight=leaves[1], backend="cuda")
        assert torch.equal(torch.autograd.grad(out, leaves[i], grad)[0], together[i])


def _store(columns: int) -> torch.Tensor:
    return torch.full((6, 2, 4, columns), 5.0)


@pytest.mark.parametrize("columns", [16, 18])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_outside_the_cache_are_not_written(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets positions and pages outside the cache, unchecked as on a GPU."""
    monkeypatch.setattr(gpu_rotary, "looks_at_values", lambda device: False)
    store, values = _store(columns), _store(columns)
    cache = pt.KeyValues(store[1:5], values[1:5], torch.tensor([[0, 9], [-3, 2]], dtype=dtype))
    rows = [torch.randn(2, heads, 3, columns) for heads in (4, 2, 2)]
    positions = torch.tensor([[1, 5, 8], [2, 1 << 40, -(1 << 40)]])
    assert torch.equal(pt.append_kv(*rows, cache, positions, backend="cuda"), rows[0])
    for kept, row in ((store, rows[1]), (values, rows[2])):
        assert torch.equal(kept[1, :, 1], row[0, :, 0])
        kept[1, :, 1] = 5.0
        assert (kept == 5.0).all()


def test_copied_values_keep_every_bit() -> None:
    """Arithmetic would replace NaN payloads; a query without heads only writes the cache."""
    bits = torch.tensor([0x7F81, -1, 0x0001, 0x7FC5] * 4, dtype=torch.int16)
    for columns in (16, 13):
        value = bits[:columns].view(BF16).expand(1, 1, 2, columns)
        cache = pt.KeyValues(
            torch.zeros(1, 1, 3, 8, dtype=BF16), torch.zeros(1, 1, 3, columns, dtype=BF16)
        )
        query, key = torch.zeros(1, 0, 2, 8, dtype=BF16), torch.ones(1, 1, 2, 8, dtype=BF16)
        out = pt.append_kv(query, key, value, cache, torch.tensor([[2, 0]]), backend="cuda")
        assert out.shape == query.shape and torch.equal(
            cache.key[0, 0, :, 0], torch.tensor([1.0, 0.0, 1.0], dtype=BF16)
        )
        assert torch.equal(
            cache.value[0, 0, [0, 2]].view(torch.int16), bits[:columns].expand(2, columns)
        )


def test_positions_outside_the_cache_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU raises with PYTRANSFORMER_CHECK=1; the emulator always does."""
    cache = pt.KeyValues(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8))
    rows = [torch.ones(1, 1, 1, 8)] * 3
    with pytest.raises(
        ValueError, match="positions holds 3, and the cache has room for 3 keys a sequence"
    ):
        pt.append_kv(*rows, cache, torch.tensor([[3]]), backend="cuda")
    assert not cache.key.any()


def test_empty_inputs() -> None:
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)):
        x, weight = torch.randn(shape, requires_grad=True), torch.ones(8, requires_grad=True)
        out = pt.rotary(x, torch.zeros(shape[2], dtype=torch.int64), weight=weight, backend="cuda")
        assert out.shape == shape and not torch.autograd.grad(out.sum(), weight)[0].any()


def test_tables_in_float64_are_rounded() -> None:
    x, (cos, sin) = torch.randn(1, 2, 3, 8), torch.randn(2, 3, 8, dtype=torch.float64)
    found = pt.rotary(x, cos=cos, sin=sin, backend="cuda")
    assert torch.equal(found, pt.rotary(x, cos=cos.float(), sin=sin.float(), backend="cuda"))


def test_unsupported_arguments_give_a_reason() -> None:
    positions = torch.arange(3)
    reasons = lambda **given: pt.explain(
        "rotary", given.pop("x", torch.zeros(1, 1, 3, 8)), positions, **given
    ).reasons["cuda"]
    assert reasons() is None
    assert "got x in float64" in reasons(x=torch.zeros(1, 1, 3, 8).double())
    assert "got weight in float64" in reasons(weight=torch.zeros(8).double())
    assert (
        reasons(x=torch.zeros(1, 1, 3, 4098)) == "last dimensions of at most 4,096, and x has 4,098"
    )


def test_binding_checks_shapes() -> None:
    """A caller without the public function gets the kernels' preconditions as errors."""
    x = torch.zeros(1, 2, 3, 8)
    arguments: list[Any] = [x, None, None, None, x.new_empty(1, 2, 3, 7), None, False, 1e-6, 0.0]
    with pytest.raises(RuntimeError, match=r"out must have the shape \(1, heads, 3, 8\)"):
        cuda_library.call("rotary_fwd", x.device, *arguments)
    arguments[1] = x[0]
    with pytest.raises(RuntimeError, match="cos and sin come together"):
        cuda_library.call("rotary_fwd", x.device, *arguments)
    arguments[1:3] = x[0, :1], x[0, :1, :, :4]
    with pytest.raises(RuntimeError, match=r"sin must have the shape \(1 or 1, 3, 8\)"):
        cuda_library.call("rotary_fwd", x.device, *arguments)
