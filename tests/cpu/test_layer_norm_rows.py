# SPDX-License-Identifier: Apache-2.0
"""The CPU's norms: streaming stores, and rows whose first value is an outlier."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt


@pytest.mark.parametrize("kind", ("layer", "rms"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_large_results_equal_those_of_their_parts(dtype: torch.dtype, kind: str) -> None:
    """Results of 12 MB and more use streaming stores; parts of the rows do not."""
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(6528, 1024, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(1024, generator=generator).to(dtype)
    with pt.use_backend(layer_norm="cpu", rms_norm="cpu", add_norm="cpu"):
        plain = (
            (lambda t: pt.rms_norm(t, (1024,), weight))
            if kind == "rms"
            else (lambda t: pt.layer_norm(t, (1024,), weight, weight))
        )
        assert torch.equal(plain(x), torch.cat([plain(part) for part in x.split(700)]))
        whole = pt.add_norm(x, residual, weight, kind=kind)
        parts = [
            pt.add_norm(a, b, weight, kind=kind) for a, b in zip(x.split(700), residual.split(700))
        ]
        for got, pieces in zip(whole, zip(*parts)):
            assert torch.equal(got, torch.cat(pieces))


@pytest.mark.parametrize(
    "dtype, stream, kind",
    (
        (torch.float32, torch.float32, "layer"),
        (torch.float32, torch.float16, "rms"),
        (torch.bfloat16, torch.bfloat16, "rms"),
        (torch.bfloat16, torch.float32, "layer"),
        (torch.float16, torch.float16, "layer"),
    ),
)
def test_large_gradients_equal_those_of_their_parts(
    dtype: torch.dtype, stream: torch.dtype, kind: str
) -> None:
    """Gradients of 12 MB and more use streaming stores.

    Dropout of 0.5 scales by two, which rounds nothing.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(to: torch.dtype) -> torch.Tensor:
        return torch.randn(6528, 1024, generator=generator).to(to)

    tensors = [normal(dtype), normal(stream), normal(dtype), normal(stream)]
    weight = torch.randn(1024, generator=generator)

    def gradients(
        x: torch.Tensor, residual: torch.Tensor, *upstream: torch.Tensor, p: float = 0.0
    ) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
        return torch.autograd.grad(
            pt.add_norm(*leaves, weight, kind=kind, dropout_p=p, dropout_seed=7), leaves, upstream
        )

    with pt.use_backend(add_norm="cpu"):
        whole = gradients(*tensors)
        for got, pieces in zip(
            whole, zip(*(gradients(*part) for part in zip(*(t.split(700) for t in tensors))))
        ):
            assert torch.equal(got, torch.cat(pieces))
        kept = (
            pt.add_norm(torch.ones(6528, 1024), None, None, dropout_p=0.5, dropout_seed=7)[1] != 0
        )
        h = (
            torch.where(kept, 2 * tensors[0], 0).float() + tensors[1].float()
        )  # x where dropout removes it
        x = gradients(torch.zeros_like(tensors[0]), h.to(stream), *tensors[2:])
        dropped = gradients(*tensors, p=0.5)
    least = (
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )  # a doubled subnormal has no extra bit
    assert torch.equal(dropped[1], x[1])
    torch.testing.assert_close(dropped[0], torch.where(kept, 2 * x[0], 0), rtol=0, atol=least)


@pytest.mark.parametrize("columns", (1, 2, 3, 5, 64, 1000))
@pytest.mark.parametrize("first", (0.0, 1e3, -1e6))
def test_statistics_do_not_depend_on_the_first_value(columns: int, first: float) -> None:
    x = (
        torch.randn(9, columns, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        + 100
    )
    x[:, :4] += first
    x = x.float()
    with pt.use_backend(layer_norm="cpu", add_norm="cpu"):
        got = pt.layer_norm(x, (columns,), eps=1e-3)
        added, _ = pt.add_norm(torch.zeros_like(x), x, torch.ones(columns), eps=1e-3)
    exact = torch.nn.functional.layer_norm(x.double(), (columns,), eps=1e-3)
    # In units of the row's deviation, no kernel can be more exact than eps s, the last bit of an
    # input of size s.
    deviation = (x.double().var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    allowed = 4 * torch.finfo(torch.float32).eps * (1 + exact.abs() + x.double().abs() / deviation)
    assert ((got - exact).abs() <= allowed).all() and ((added - exact).abs() <= allowed).all()


def test_dropout_removes_a_nan_at_the_start_of_a_row() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(4))
    weight = torch.ones(32)
    kept = pt.add_norm(torch.ones(64, 32), None, weight, dropout_p=0.5, dropout_seed=7)[1] != 0
    x[:, 0] = float("nan")
    with pt.use_backend(add_norm="cpu"):
        normed, total = pt.add_norm(x, None, weight, dropout_p=0.5, dropout_seed=7)
    assert (~kept[:, 0]).any() and kept[:, 0].any()
    assert torch.equal(normed.isfinite().all(-1), ~kept[:, 0]) and torch.equal(
        total[:, 0].isnan(), kept[:, 0]
    )


@pytest.mark.parametrize("deviations", (0.0, 0.12, 0.95, 1.0, 1.9, 30.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_one_pass_statistics_are_as_accurate(dtype: torch.dtype, deviations: float) -> None:
    """The mean and rstd for backward are accurate to float32, on both sides of the one-pass limit.

    The size of the mean bounds the accuracy.
    """
    x = (torch.randn(2048, 1024, generator=torch.Generator().manual_seed(6)) + deviations).to(dtype)
    pt.layer_norm(x[:1], (1024,), backend="cpu")  # loads the library
    out, mean, rstd = torch.empty_like(x), torch.empty(2048), torch.empty(2048)
    torch.ops.pytransformer_C.layer_norm_fwd(
        x, None, None, None, None, out, None, mean, rstd, 1, 1024, 0, 1e-5, 0.0, False
    )
    h, eps = x.double(), torch.finfo(torch.float32).eps
    exact = (h.var(-1, correction=0) + 1e-5).rsqrt()
    assert ((mean - h.mean(-1)).abs() <= 2 * eps * h.abs().mean(-1)).all()
    assert ((rstd - exact).abs() <= 4 * eps * exact).all()


def test_backward_corrects_the_rounding_of_the_mean() -> None:
    """With mean 100 and deviation 0.1, a float32 mean is off by up to 4e-6.

    Every xhat of the row is then off by ten times that.
    """
    x = 100 + 0.1 * torch.randn(16, 1000, generator=torch.Generator().manual_seed(8))
    for row in x:
        weight = torch.ones(1000, requires_grad=True)
        (xhat,) = torch.autograd.grad(
            pt.layer_norm(row[None], (1000,), weight, eps=0.0, backend="cpu").sum(), weight
        )
        h = row.double()
        assert ((xhat - (h - h.mean()) / h.std(correction=0)).abs() <= 4e-6).all()
