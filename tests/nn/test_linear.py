# SPDX-License-Identifier: Apache-2.0
"""Products of few rows by the C++ fast path and by Python: every size, layout and dtype.

PyTorch computes calls that are differentiated or observed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pytransformer.nn import linear as module
from pytransformer.nn.linear import FEW_ROWS, Linear, linear, of_few_rows
from pytransformer.ops._core import fast_path, native
from pytransformer.testing.guarded import place
from pytransformer.testing.paths import needs_fast_path

# Factors of eps times the sum of absolute values: for zero-mean data and for any data
# (docs/accuracy.md).
BOUND = {
    torch.float32: (2.0, 6.0),
    torch.bfloat16: (1.0, 1.0),
    torch.float16: (1.0, 1.0),
    torch.float64: (2.0, 6.0),
}
SIZES = [
    (1, 1),
    (3, 2),
    (31, 5),
    (32, 64),
    (33, 63),
    (100, 65),
    (768, 7),
    (1023, 130),
    (1025, 66),
    (4099, 9),
    (9, 1100),
    (264, 513),
]
# The contiguous axis of the weights: (n, k), or the transpose of a (k, n).
LAYOUTS = ["rows", "columns"]


@pytest.fixture(params=[pytest.param("fast_path", marks=needs_fast_path), "Python"])
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Record the rows of each call of our kernel, by one path only."""
    if (reason := native.why_not("feed_forward_linear")) is not None:
        pytest.skip(reason)
    seen: list[int] = []

    def spied(run: Callable[..., Any]) -> Callable[..., Any]:
        def spy(x: torch.Tensor, *others: Any) -> Any:
            found = run(x, *others)
            if found is not NotImplemented:
                seen.append(x.numel() // x.shape[-1])
            return found

        return spy

    fast_path.why_not()  # loads it
    by_fast_path = request.param == "fast_path"
    holder, name = (fast_path, "linear") if by_fast_path else (module, "linear_of_few_rows")
    monkeypatch.setattr(holder, name, spied(getattr(holder, name)))
    with contextlib.nullcontext() if by_fast_path else fast_path.off():
        yield seen


def operands(
    rows: int, k: int, n: int, dtype: torch.dtype, offset: float = 0.0, layout: str = "rows"
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 7919 + k * 31 + n)
    x, weight, bias = (
        (torch.randn(shape, generator=generator) + offset).to(dtype)
        for shape in ((rows, k), (n, k), (n,))
    )
    return x, lying(weight, layout), bias


def lying(weight: torch.Tensor, layout: str, where: str = "contiguous") -> torch.Tensor:
    """Return a copy in this layout, surrounded by NaN that a read outside would meet."""
    return place(weight, where) if layout == "rows" else place(weight.t(), where).t()


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    """Return the product in float64, or in 80 bits for float64 inputs."""
    a, w = (
        t.double().numpy().astype(np.longdouble if x.dtype == torch.float64 else np.float64)
        for t in (x, weight)
    )
    return a @ w.T + (0 if bias is None else bias.double().numpy())


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_within_the_bound(
    calls: list[int], rows: int, dtype: torch.dtype, layout: str
) -> None:
    for k, n in SIZES:
        for offset in (0.0, 1.0):
            x, weight, bias = operands(rows, k, n, dtype, offset, layout)
            for b in (bias, None):
                with torch.no_grad():
                    out = linear(x, weight, b)
                exact, scale = (
                    exact_linear(*(None if t is None else change(t) for t in (x, weight, b)))
                    for change in (torch.clone, torch.abs)
                )
                assert out.dtype == dtype and out.shape == exact.shape
                error = np.abs(out.double().numpy() - exact)
                assert (error <= BOUND[dtype][offset > 0] * torch.finfo(dtype).eps * scale).all(), (
                    k,
                    n,
                    offset,
                )
    assert calls == [rows] * (4 * len(SIZES))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_strides_within_the_bound(calls: list[int], layout: str) -> None:
    x, weight, bias = operands(6, 96, 40, torch.float32, layout=layout)
    want = F.linear(x, weight, bias)
    with torch.inference_mode():
        assert torch.allclose(
            linear(x.view(2, 3, 96), weight, bias), want.view(2, 3, 40), atol=1e-5
        )
        assert torch.allclose(linear(x.T.contiguous().T, weight, bias), want, atol=1e-5)
        assert torch.allclose(linear(x[0], weight, bias), want[0], atol=1e-5)
        assert torch.allclose(
            linear(x.view(3, 2, 96).transpose(0, 1), weight),
            (want - bias).view(3, 2, 40).transpose(0, 1),
            atol=1e-5,
        )
        off = lying(weight, layout, "offset")  # one element off any alignment
        assert off.data_ptr() % 64 and torch.equal(linear(x, off, bias), linear(x, weight, bias))
    assert calls == [6, 6, 1, 6, 6, 6]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_weights_contiguous_along_k_give_the_same_bits(
    calls: list[int], dtype: torch.dtype
) -> None:
    """Modules with (k, n) weights pass them so; the result is None if the kernel declines."""
    x, weight, bias = operands(3, 96, 40, dtype, layout="columns")
    other = weight.t()
    with torch.no_grad():
        for b in (bias, None):
            assert torch.equal(of_few_rows(x, other, b, along_k=True), linear(x, weight, b))
        assert calls == [3] * 4
        assert (
            of_few_rows(x, other, bias) is None
            and of_few_rows(x, other[:, ::2], bias[::2], along_k=True) is None
        )
        assert of_few_rows(x[:, :5], other, bias, along_k=True) is None
    assert (
        of_few_rows(x, other.detach().clone().requires_grad_(), bias, along_k=True) is None
        and calls == [3] * 4
    )


def test_other_weight_layouts_use_pytorch(calls: list[int]) -> None:
    x, weight, _ = operands(6, 96, 40, torch.float32)
    with torch.no_grad():
        for other in (
            weight[::2],
            weight[:, ::2].t().contiguous().t()[::2],
            weight.t().contiguous()[:, ::2].t(),
            weight[:1].expand(4, 96),
        ):
            assert torch.equal(
                linear(x[:, : other.shape[1]], other), F.linear(x[:, : other.shape[1]], other)
            )
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_does_not_spread(calls: list[int], layout: str, dtype: torch.dtype) -> None:
    x, weight, _ = operands(5, 71, 67, dtype, layout=layout)
    x[2, 70], weight[66, 0] = torch.nan, torch.inf
    with torch.no_grad():
        out = linear(x, weight)
    want = torch.zeros(5, 67, dtype=torch.bool)
    want[2], want[:, 66] = True, True
    assert torch.equal(~out.isfinite(), want) and calls == [5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_and_other_rows_change_no_bit(
    calls: list[int], dtype: torch.dtype, layout: str
) -> None:
    x, weight, bias = operands(8, 770, 1000, dtype, layout=layout)
    threads = torch.get_num_threads()
    with torch.no_grad():
        try:
            torch.set_num_threads(1)
            want = linear(x, weight, bias)
            torch.set_num_threads(2)
            assert torch.equal(linear(x, weight, bias), want)
        finally:
            torch.set_num_threads(threads)
        for rows in range(1, 8):
            assert torch.equal(linear(x[:rows], weight, bias), want[:rows])
    assert len(calls) == 9


def vmapped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: linear(row, weight, bias))(x)


def compiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(linear, backend="eager", fullgraph=True)(x, weight, bias)


def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as counter:
        out = linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * x.numel() * weight.shape[0]
    return out


def autocast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    return out.float()


@pytest.mark.parametrize("way", [vmapped, compiled, counted, autocast])
def test_observed_calls_use_pytorch(calls: list[int], way: Callable[..., torch.Tensor]) -> None:
    x, weight, bias = operands(4, 64, 48, torch.float32)
    with torch.no_grad():
        assert torch.allclose(
            way(x, weight, bias), F.linear(x, weight, bias), atol=0.2 if way is autocast else 1e-5
        )
    assert calls == []


def test_gradients_and_many_rows_use_pytorch(calls: list[int]) -> None:
    ours, theirs = Linear(16, 12), nn.Linear(16, 12)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(FEW_ROWS, 16, generator=torch.Generator().manual_seed(0))
    grads = [
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
        for layer in (ours, theirs)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and calls == []
    with torch.no_grad():
        ours(torch.cat([x, x]))
        assert calls == []
        ours(x)
    assert calls == [FEW_ROWS]


def test_bad_input_raises_pytorchs_error(calls: list[int]) -> None:
    x, weight, bias = operands(2, 8, 4, torch.float32)
    with torch.no_grad():
        for wrong in (
            (x[:, :7], weight, bias),
            (x.double(), weight, bias),
            (x, weight, bias[:3]),
            (x, weight, bias.double()),
        ):
            with pytest.raises(RuntimeError):
                linear(*wrong)
    assert calls == []
