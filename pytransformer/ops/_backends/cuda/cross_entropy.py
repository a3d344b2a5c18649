# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda`` of linear_cross_entropy, on csrc/cuda/cross_entropy and csrc/cuda/matmul.

Forward stores no logit: the GEMM's epilogue writes two or three numbers per row and 128 classes.
Backward processes a chunk of rows at a time. A GEMM's epilogue writes their d_logits, and two plain
GEMMs compute dx and add to dweight::

    d_logits = (p_factor p - g q) (1 - tanh²)  in x's dtype; p_factor is g and tanh 0 if no option
    dx = d_logits weight;  dweight += d_logitsᵀ x
    dbias = sum over rows of d_logits, before it is rounded

If forward computes the gradients, its GEMM also writes exp(z - maximum of 128 classes) of a chunk,
in bfloat16. A pass over them in place multiplies each row by p_factor exp(maximum - m - l) and
subtracts g q, which gives d_logits without a second GEMM of the logits. Both roundings together
stay below eps of p. A softcap's factor needs the logit itself, and float16 needs the upstream
gradient before rounding, so both recompute the logits in backward.

In float16 a power of two first scales the maximum of g and p_factor to 2^15, because small
probabilities would underflow. The float32 results are divided by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import as_written, constant_in_graphs, matrix
from ..._problem.cross_entropy import chunks, float_gemm, row_factors, target_weights, upstream
from ..gpu import cross_entropy as gpu
from . import library as cuda_library
from . import matmul as cuda_matmul
from .matmul import WIDTH, alloc_padded, bias_parts, gemm, operand, padded_bias

HALF_SCALE = 2.0**15  # float16 ends at 2^16

# Maximum bytes per chunk of rows. Forward: the partials of 2^17 classes take 8 KB per row, so a
# chunk has 32,768 rows. Backward: a chunk has 4,096 rows of d_logits for as many classes. Each
# chunk adds to dweight, which costs 16 bytes per element against 6 operations per row.
PARTIALS_BYTES, D_LOGITS_BYTES = 1 << 28, 1 << 30
PARTIALS_BYTES_EMULATED, D_LOGITS_BYTES_EMULATED = 1 << 11, 1 << 16
# Forward computes the gradients if a product has at least this many operations, by count about 0.1
# ms on an H100. Below it the C++ fast path, which has no such call, should save more than the
# product does; no GPU has compared them.
EARLY_FLOPS, EARLY_FLOPS_EMULATED = 1 << 36, 1 << 16


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """Return the backend of linear_cross_entropy."""
    kernels = gpu.Kernels(_forward, _backward, _forward_with_gradients)
    ours = gpu.backend(
        "cuda", op, lambda: kernels, check_values, why_not, _extra_bytes, cuda_library.recorded
    )

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        return op.backends["reference"].forward(a) if a.x.numel() == 0 else ours.forward(a)

    def backward(a: Any, *given: Any) -> Any:
        return (
            op.backends["reference"].backward(a, *given)
            if a.x.numel() == 0
            else ours.backward(a, *given)
        )

    return dataclasses.replace(ours, forward=forward, backward=backward)


def why_not(a: Any) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    if a.accuracy:
        return "the kernels keep no argmax for return_accuracy"
    if a.class_weight is not None and a.label_smoothing:
        return "the kernels support class_weight without label_smoothing"
    return cuda_matmul.why_not("cross_entropy_fwd", a.x, *a.weight.shape)


def early_flops() -> int:
    """Return the min operations of a product for gradients in forward."""
    return EARLY_FLOPS_EMULATED if cuda_library.emulating() else EARLY_FLOPS


@constant_in_graphs
def runs_on(device_type: str, index: int | None) -> bool:
    """Return true if the kernels run on the device, which torch.compile evaluates once."""
    device = torch.device(device_type if index is None else f"{device_type}:{index}")
    return cuda_library.why_not("cross_entropy_fwd", device) is None and cuda_library.runs_sm90a(
        device
    )


def _forward(
    a: Any, losses: torch.Tensor, split_lse: torch.Tensor, correct: torch.Tensor | None = None
) -> None:
    step = min(len(a.x), _rows(PARTIALS_BYTES, PARTIALS_BYTES_EMULATED, 4 * _partials(a)))
    for _ in _losses(a, losses, split_lse, step):
        pass
    if a.class_weight is not None:
        losses *= target_weights(a, torch.float32)


def _losses(
    a: Any,
    losses: torch.Tensor,
    split_lse: torch.Tensor,
    step: int,
    exponentials: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Compute the losses of ``step`` rows at a time; yield the rows, their partials and picked."""
    x, weight, bias = _operands(a)
    partials, picked = (
        torch.empty(step * _partials(a), device=a.x.device),
        torch.empty(step, device=a.x.device),
    )
    for part in chunks(len(a.x), step):
        n = len(losses[part])
        scratch = partials[: n * _partials(a)], picked[:n]
        cuda_library.call(
            "cross_entropy_fwd", x.device, x[part], weight.t(), bias, a.target[part], *scratch,
            losses[part], *split_lse[:, part], None if exponentials is None else exponentials[:n],
            a.ignore_index, a.label_smoothing, a.softcap,
        )  # fmt: skip
        yield part, *scratch


def _forward_with_gradients(
    a: Any,
    losses: torch.Tensor,
    split_lse: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> None:
    """Compute the losses and the gradients of their reduction, chunk by chunk."""
    classes, step = a.weight.shape[0], min(len(a.x), _chunk_rows(a.weight.shape[0]))
    d_logits = alloc_padded(a.x[:step], classes)
    gradients = _Gradients(a, step, dx, d_weight, d_bias)
    of_rows = upstream(a, torch.ones((), device=a.x.device), torch.float32)
    for part, partials, picked in _losses(a, losses, split_lse, step, d_logits):
        target = a.target[part]
        g, p_factor = row_factors(a._replace(target=target), *of_rows, split_lse[:, part])
        if a.class_weight is not None:
            weights = target_weights(a._replace(target=target), torch.float32)
            losses[part] *= weights
            g = g * weights
        cuda_library.call(
            "cross_entropy_d_logits", a.x.device, target, partials, picked,
            *split_lse[:, part], g, p_factor, d_logits[: len(g)], gradients.bias_sums(len(g)),
            classes, a.ignore_index, a.label_smoothing,
        )  # fmt: skip
        gradients.add(part, d_logits[: len(g), :classes])
    gradients.finish()


def _backward(
    a: Any,
    g: torch.Tensor,
    p_factor: torch.Tensor | None,
    split_lse: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> None:
    with as_written(a.x.device):
        x, weight, bias = _operands(a)
        classes, step = a.weight.shape[0], min(len(a.x), _chunk_rows(a.weight.shape[0]))
        if a.class_weight is not None:
            g = g * target_weights(a, torch.float32)  # the factor of q, without label smoothing
        if p_factor is None and a.softcap:
            p_factor = g
        scale = _scale(g, p_factor) if x.dtype == torch.float16 else None
        if scale is not None:
            g, p_factor = g * scale, None if p_factor is None else p_factor * scale
        d_logits = None if dx is None and d_weight is None else alloc_padded(x[:step], classes)
        gradients = _Gradients(a, step, dx, d_weight, d_bias, scale)
        for part in chunks(len(a.x), step):
            n = len(g[part])
            to = None if d_logits is None else d_logits[:n]
            cuda_library.call(
                "cross_entropy_bwd", x.device, x[part], weight.t(), bias, a.target[part],
                *split_lse[:, part], g[part], None if p_factor is None else p_factor[part], to,
                gradients.bias_sums(n), a.ignore_index, a.label_smoothing, a.softcap,
            )  # fmt: skip
            gradients.add(part, None if to is None else to[:, :classes])
        gradients.finish()


class _Gradients:
    """The products with d_logits, chunk by chunk of ``step`` rows.

    A product writes a result of x's dtype directly if no other chunk adds to it and no scale is
    divided out; other sums are float32 until then.
    """

    def __init__(
        self,
        a: Any,
        step: int,
        dx: torch.Tensor | None,
        d_weight: torch.Tensor | None,
        d_bias: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> None:
        self.x, self.weight, _ = _operands(a)
        self.dx, self.d_weight, self.d_bias = dx, d_weight, d_bias
        self.unscale = None if scale is None else 1 / scale
        self.valid = (a.target != a.ignore_index)[:, None]
        (rows, d), (classes, _), device = a.x.shape, a.weight.shape, a.x.device
        width = -(-d // WIDTH) * WIDTH
        self.dx_sums = self.weight_sums = self.sums = None
        if dx is not None and scale is not None:
            self.dx_sums = torch.empty(step, width, device=device)
        if d_weight is not None and (scale is not None or rows > step):
            self.weight_sums = torch.empty(classes, width, device=device)
        if d_bias is not None:
            self.sums = torch.empty(bias_parts(step), classes, device=device)

    def bias_sums(self, rows: int) -> torch.Tensor | None:
        """Return memory for the column sums of a chunk's d_logits over 64 rows each."""
        return None if self.sums is None else self.sums[: bias_parts(rows)]

    def add(self, part: slice, d_logits: torch.Tensor | None) -> None:
        """Add a chunk, whose ``bias_sums`` are complete."""
        rows = part.stop - part.start
        if self.d_bias is not None:
            sums = self.bias_sums(rows)
            assert sums is not None
            self.d_bias += sums.sum(0)
        if self.dx is not None:
            assert d_logits is not None
            if self.dx_sums is None:
                gemm(d_logits, self.weight, self.dx[part])
            else:
                assert self.unscale is not None
                _gemm(d_logits, self.weight, self.dx_sums[:rows])
                product = self.dx_sums[:rows, : self.dx.shape[1]]
                torch.mul(product, self.unscale, out=self.dx[part])
        if self.d_weight is not None:
            assert d_logits is not None
            # an ignored row may hold NaN
            x = operand(torch.where(self.valid[part], self.x[part], 0.0))
            if self.weight_sums is None:
                gemm(d_logits.t(), x, self.d_weight)
            else:
                _gemm(d_logits.t(), x, self.weight_sums, add=part.start > 0)

    def finish(self) -> None:
        """Round the sums of several chunks, and divide the scale out."""
        if self.d_weight is not None and self.weight_sums is not None:
            sums = self.weight_sums[:, : self.d_weight.shape[1]]
            if self.unscale is None:
                self.d_weight.copy_(sums)
            else:
                torch.mul(sums, self.unscale, out=self.d_weight)
        if self.d_bias is not None and self.unscale is not None:
            self.d_bias *= self.unscale


def scaled(t: torch.Tensor, grad: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Return t times the scalar grad, rounded once to t's dtype; in place, t itself.

    In place, the kernel reads and writes nothing if grad is 1.
    """
    out = t if in_place else torch.empty_like(t)
    aligned = t.is_contiguous() and t.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    if aligned and t.dtype == torch.bfloat16 and runs_on(t.device.type, t.device.index):
        cuda_library.call("cross_entropy_scale", t.device, t, grad, out)
    else:
        torch.mul(t, grad.reshape([1] * t.dim()), out=out)
    return out


def _gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    """Compute out (+)= a @ b in float32; rows of out hold a multiple of eight elements.

    Our kernel computes sums: on an H100, a separate addition after cuBLAS took 1.05 ms for a
    product of 2.95 ms, and a buffer of out's size.
    """
    columns = b.shape[1]
    if add or not cuda_matmul.use_cublas(len(out), columns, a.shape[1]):
        cuda_library.call("matmul_sums", a.device, a, b, out, add)
    else:
        float_gemm(a, b, out[:, :columns])


def _scale(g: torch.Tensor, p_factor: torch.Tensor | None) -> torch.Tensor:
    """Return a power of two that scales the max of |g| and |p_factor| to between 2^14 and 2^15.

    No digit changes except in elements that become subnormal.
    """
    largest = g.abs().max()
    if p_factor is not None:
        largest = torch.maximum(largest, p_factor.abs().max())
    exponent = torch.frexp(largest).exponent.clamp(min=-100)
    return torch.ldexp(torch.full_like(g[0], HALF_SCALE), -exponent)


def _operands(a: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return operand(matrix(a.x)), operand(matrix(a.weight)), padded_bias(a.bias)


def _partials(a: Any) -> int:
    """Return the number of partials per row that forward writes."""
    return cuda_library.ask("cross_entropy_partials", a.weight.shape[0], a.label_smoothing > 0)


def _rows(max_bytes: int, emulated: int, bytes_of_a_row: int) -> int:
    """Return the rows per chunk, a multiple of 128, the height of a GEMM tile."""
    return (
        max((emulated if cuda_library.emulating() else max_bytes) // bytes_of_a_row // 128, 1) * 128
    )


def _chunk_rows(classes: int) -> int:
    return _rows(D_LOGITS_BYTES, D_LOGITS_BYTES_EMULATED, 2 * classes)


def _extra_bytes(a: Any) -> int:
    """Return the maximum of the bytes of forward and backward, or of both if they are one.

    Forward needs a chunk's partials. Gradients need a chunk's d_logits, their sums over 64 rows and
    x, float32 dx in float16, and float32 dweight in float16 or with several chunks.
    """
    rows, (classes, d) = a.target.numel(), a.weight.shape
    width, half = -(-d // WIDTH) * WIDTH, a.x.dtype == torch.float16
    chunk = min(rows, _chunk_rows(classes))
    gradients = chunk * (2 * classes + classes // 16 + 2 * d + (4 * width if half else 0))
    if half or rows > chunk:
        gradients += 4 * classes * width
    of_a_row = 4 * _partials(a)
    if a.save not in ("", "logits"):
        return gradients + chunk * of_a_row + 16 * rows
    partials = of_a_row * min(rows, _rows(PARTIALS_BYTES, PARTIALS_BYTES_EMULATED, of_a_row))
    return max(partials, gradients) + 16 * rows  # losses, split lse and g of all rows
