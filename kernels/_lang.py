# SPDX-License-Identifier: Apache-2.0
"""Shared by all kernels: constants, dot, tanh, the dropout mask, and the launch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

# Fixed when Triton is imported, because that decorates its library functions. torch may import it
# first.
INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
INTERPRET = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)

_observer: list[Callable[..., Any]] = []  # replaces the launch: see observed()
_thread = threading.local()  # observer of launches: see told_of_launches()


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    *arguments: Any,
    warps: int,
    stages: int,
    **options: int,
) -> None:
    """Run ``kernel`` on a flat grid of ``programs`` programs, which may exceed 65,535."""
    if programs == 0:
        return
    # Triton 3.9 contracts products and sums only on request.
    options = (
        {}
        if INTERPRETED
        else dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True, **options)
    )
    if _observer:
        _observer[-1](kernel, arguments, options)
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        compiled = kernel[(programs,)](*arguments, **options)
    if (told := getattr(_thread, "told", None)) is not None:
        told(compiled, programs, arguments, len(kernel.params))


def kernel(fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Wrap ``triton.jit`` for launched kernels: compile once per layout and set of features, for
    all sizes.

    Triton turns an integer argument of 1 into a constant and passes the compiler which integers are
    multiples of 16. ``do_not_specialize`` covers only arguments, not a tuple's elements, so a
    growing length would compile the kernel up to three times for each of its integers. Here no
    integer is a constant, and integers in tuples have no known divisor, except in a tuple class
    with ``LAYOUT``: either all of its integers are multiples of 16, or none counts as one.
    """
    if fn is None:
        return functools.partial(kernel, do_not_specialize=do_not_specialize)
    made = triton.jit(fn, do_not_specialize=do_not_specialize)
    if not INTERPRETED:
        made.device_caches = defaultdict(functools.partial(_caches, made))
    return made


def _caches(made: Any) -> tuple[Any, ...]:
    """Return Triton's caches of a kernel for a device.

    The last entry binds arguments and returns the type of each and what the compiler may assume of
    its value; for a tuple, two tuples of its class.

    Triton has no switch for this. Annotations and do_not_specialize fix a parameter's type, but not
    those of a tuple's elements (triton-lang/triton#6152 leaves tuples for later). The wrapper costs
    3 us per launch that neither _launch.py nor the fast path repeats.
    """
    *caches, bind = made.create_binder()
    # One cache per parameter: tuples of different classes may be equal, and a parameter has one
    # class.
    rules = [
        None if p.is_constexpr else functools.lru_cache(maxsize=1024)(_of_argument)
        for p in made.params
    ]

    def bind_unspecialized(*arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
        bound, known, options = bind(*arguments, **options)
        return (
            bound,
            [entry if rule is None else rule(*entry) for rule, entry in zip(rules, known)],
            options,
        )

    return (*caches, bind_unspecialized)


def _of_argument(kind: Any, value: Any) -> tuple[Any, Any]:
    """Return (type, assumption) of an argument without size-dependent parts; a plain integer keeps
    its multiple of 16.
    """
    if isinstance(kind, tuple):
        return _unspecialized(kind, value, "")
    return ("i32", "") if kind == "constexpr" and value == 1 else (kind, value)


def _unspecialized(kind: Any, value: Any, known: str) -> tuple[Any, Any]:
    """Like _of_argument, within a tuple, where ``known`` is the assumption about integers."""
    if isinstance(kind, tuple):
        if getattr(type(kind), "LAYOUT", False):
            known = "D" if all(v == "D" for v in _of_integers(kind, value)) else ""
        entries = zip(*(_unspecialized(k, v, known) for k, v in zip(kind, value)))
        return tuple(type(kind)(*e) if hasattr(kind, "_fields") else e for e in entries)
    if _is_integer(kind, value):
        return "i32" if kind == "constexpr" else kind, known
    return kind, value


def _of_integers(kind: Any, value: Any) -> Iterator[Any]:
    if isinstance(kind, tuple):
        for pair in zip(kind, value):
            yield from _of_integers(*pair)
    elif _is_integer(kind, value):
        yield value


def _is_integer(kind: str, value: Any) -> bool:
    return kind in ("i32", "i64", "u64") or (kind == "constexpr" and value == 1)


@contextlib.contextmanager
def observed(observer: Callable[..., Any]) -> Any:
    """Call ``observer(kernel, arguments, options)`` in place of each launch within the block."""
    _observer.append(observer)
    try:
        yield
    finally:
        _observer.pop()


@contextlib.contextmanager
def told_of_launches(told: Callable[[Any, int, tuple[Any, ...], int], None]) -> Iterator[None]:
    """Call ``told(compiled kernel, programs, arguments, number of parameters)`` after each launch.

    Applies to the launches of this thread within the block.
    """
    _thread.told = told
    try:
        yield
    finally:
        _thread.told = None


def telling() -> bool:
    """Return True if launches of this thread are observed."""
    return getattr(_thread, "told", None) is not None


@triton.jit
def dot(a, b, acc, C: tl.constexpr):
    """Return acc + a @ b in C.PRECISION. The interpreter multiplies bfloat16 matrices wrongly, so
    there in float32.

    C is passed completely, because Triton 3.6 passes no string to a function.
    """
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=C.PRECISION)


@triton.jit
def steps_of(x, stride):
    """Return x * stride. None means 1, known at compile time, so that loads along it are wide."""
    if stride is not None:
        x = x * stride
    return x


@triton.jit
def apart_from_products(b_mask, C: tl.constexpr):
    """Return a dropout or mask operand's bytes as integers that the compiler does not trace to
    their load.

    Triton 3.6 lays out mma.sync operands for the narrowest load they depend on, and twice as wide
    through tl.join, as for the dropout mask. With bytes, 4 threads of 8 values (kWidth 8) share K
    even if K is only 16, so two threads duplicate values: on an H100, d_key and d_value of 16-bit
    masked attention with dropout were wrong. A maximum over an axis of size one, which no layout
    passes through, leaves kWidth 4. Source: triton-lang/triton#10645, #11691.
    """
    x = b_mask.to(tl.int32)
    if C.DROPOUT and C.BM < 32:  # K is BM or BN, and BN is at least 32
        x = tl.max(tl.expand_dims(x, -1), -1)
    return x


@triton.jit
def not_negative(x, like):
    """Return x >= 0 for a scalar x, as the mask of a load of pointers `like`.

    The interpreter of Triton 3.9 broadcasts a scalar comparison to integers, which loads reject, so
    there the scalar is broadcast first.
    """
    if INTERPRET:
        x = tl.zeros(like.shape, tl.int64) + x
    return x >= 0


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 x to dtype, to nearest even. The interpreter truncates to bfloat16, so there
    round before.
    """
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def divided(a, b):
    """Return a / b, correctly rounded; b is a block or a scalar. On NVIDIA GPUs `/` of float32 is
    div.full, off by up to 2 ulp.
    """
    return tl.div_rn(a, tl.zeros_like(a) + b)


@triton.jit
def rsqrt(x):
    """Return 1 / sqrt(x) of float32 within 0.51 ulp; two roundings would give 1 ulp.

    Uses one step of Newton's method, whose residual 1 - x y^2 includes the rounding error of x y.
    """
    y = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))
    root = x * y
    residual = tl.fma(-root, y, 1.0) - tl.fma(x, y, -root) * y
    better = tl.fma(0.5 * residual, y, y)
    return tl.where(better == better, better, y)  # NaN for 0 and infinity


@triton.jit
def tanh(x):
    """Return tanh(x) to 2e-7 relative: the fitted odd polynomial x + x^3 P(x^2) below 0.6, 1 - 2 /
    (1 + e^2x) above.
    """
    z = x * x
    p = z * -0.005894480914075617 + 0.020795446692862346
    p = p * z - 0.05378369286235975
    p = p * z + 0.1333192275238217
    p = p * z - 0.3333329796161276
    size = tl.abs(x)
    large = 1.0 - 2.0 / (1.0 + tl.exp2(size * (2 * LOG2E)))
    return tl.where(size < 0.6, x + x * z * p, tl.where(x < 0, -large, large))


def precision(dtype: torch.dtype) -> str:
    """Return the precision of ``dot``: TF32 for float32 if PyTorch allows it.

    PyTorch has two switches. Reading the old one, ``allow_tf32``, raises after the new one was set;
    the new one, ``fp32_precision``, reflects both.
    """
    return (
        "tf32"
        if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        else "ieee"
    )


# Dropout: pytransformer.reference.philox defines the layout.


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Philox-4x32-7. A 64-bit product is one instruction; a high and a low 32-bit one are two."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    M0: tl.constexpr = 0xD2511F53
    M1: tl.constexpr = 0xCD9E8D57
    W0: tl.constexpr = 0x9E3779B9
    W1: tl.constexpr = 0xBB67AE85
    for _ in tl.static_range(7):
        a = c0.to(tl.uint64) * M0
        b = c2.to(tl.uint64) * M1
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = tl.add(k0, tl.full([], W0, tl.uint32), sanitize_overflow=False)
        k1 = tl.add(k1, tl.full([], W1, tl.uint32), sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def from_start(i, start):
    """Return i + start. None is 0 and generates no code: an unneeded sum cost a kernel 8 bytes of
    stack.
    """
    if start is not None:
        i = i + start
    return i


@triton.jit
def keep_tile(seed, c1, c2, c3, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Return the keep mask, int1 [BM, BN], of the tile with first column j0 (absolute, j0 % 32 ==
    0).

    c1, c2, c3 are the other counter words, each a scalar or [BM, 1]: row, head, batch in attention;
    row low, row high, tag elsewhere.

    One Philox call per row and eight columns, then a permutation. With queries as rows the compiler
    carries the accumulator's layout back through the permutation, so it moves no data; with a
    transposed tile it would.
    """
    tl.static_assert(BN % 32 == 0)
    group = (j0 // 8 + tl.arange(0, BN // 8)).to(tl.uint32)[None, :]
    zero = tl.zeros([BM, BN // 8], tl.uint32)
    w0, w1, w2, w3 = philox(
        zero + group,
        zero + c1.to(tl.uint32),
        zero + c2.to(tl.uint32),
        zero + c3.to(tl.uint32),
        seed,
    )
    w = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [BM, BN / 8, t % 2, t // 2]
    w = tl.join(w << 16, w)  # the draw is in the high half: no mask, no shift for odd keys
    # Dimensions: rows, j // 32, (j % 8) // 2, t % 2, t // 2, j % 2.
    w = tl.reshape(w, [BM, BN // 32, 4, 2, 2, 2])
    w = tl.reshape(tl.permute(w, (0, 1, 4, 3, 2, 5)), [BM, BN])
    return w >= (tl.cast(threshold, tl.uint32) << 16)
