# SPDX-License-Identifier: Apache-2.0
"""What all kernels share: constants, products, tanh, the dropout mask, and the launch."""

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

# Fixed when Triton is imported: its own library functions are decorated then. (torch may import it before anyone here.)
INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
INTERPRET = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)

_observer: list[Callable[..., Any]] = []  # replaces the launch: see observed()
_thread = threading.local()  # told: see told_of_launches()


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int, stages: int, **options: int) -> None:
    """Run ``kernel`` on ``programs`` programs of one flat grid dimension, which may exceed 65,535."""
    if programs == 0:
        return
    # Triton 3.9 contracts no products and sums unless told to.
    options = {} if INTERPRETED else dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True, **options)
    if _observer:
        _observer[-1](kernel, arguments, options)
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        compiled = kernel[(programs,)](*arguments, **options)
    if (told := getattr(_thread, "told", None)) is not None:
        told(compiled, programs, arguments, len(kernel.params))


def kernel(fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """``triton.jit`` for what is launched: compiled once for each layout and set of features, whatever the sizes.

    Triton makes a constant of an integer that is 1 and tells the compiler which are multiples of 16. It asks ``do_not_specialize`` only
    of arguments, not of what is in a tuple, and a length that grows would compile the kernel up to three times for each of its numbers.
    Here no integer is a constant, and those in tuples are multiples of nothing known, but for a tuple whose class has ``LAYOUT``: all
    of its integers are multiples of 16, or none is taken as one.
    """
    if fn is None:
        return functools.partial(kernel, do_not_specialize=do_not_specialize)
    made = triton.jit(fn, do_not_specialize=do_not_specialize)
    if not INTERPRETED:
        made.device_caches = defaultdict(functools.partial(_caches, made))
    return made


def _caches(made: Any) -> tuple[Any, ...]:
    """What Triton keeps of a kernel for a device. The last entry binds arguments, and says of each its type and what of its value the
    compiler may know: for a tuple two tuples of its class."""
    *caches, bind = made.create_binder()
    # Tuples of different classes may be equal, and a parameter has one class: so a cache for each.
    rules = [None if p.is_constexpr else functools.lru_cache(maxsize=1024)(_of_argument) for p in made.params]

    def bind_unspecialized(*arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
        bound, known, options = bind(*arguments, **options)
        return bound, [entry if rule is None else rule(*entry) for rule, entry in zip(rules, known)], options

    return (*caches, bind_unspecialized)


def _of_argument(kind: Any, value: Any) -> tuple[Any, Any]:
    """(type, what is known of the value) of an argument without what sizes decide; a number of its own keeps its multiples of 16."""
    if isinstance(kind, tuple):
        return _unspecialized(kind, value, "")
    return ("i32", "") if kind == "constexpr" and value == 1 else (kind, value)


def _unspecialized(kind: Any, value: Any, known: str) -> tuple[Any, Any]:
    """The same within a tuple, where ``known`` is known of integers."""
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
    """Within the block, call ``observer(kernel, arguments, options)`` in place of each launch."""
    _observer.append(observer)
    try:
        yield
    finally:
        _observer.pop()


@contextlib.contextmanager
def told_of_launches(told: Callable[[Any, int, tuple[Any, ...], int], None]) -> Iterator[None]:
    """Within the block, in this thread, call ``told(compiled kernel, programs, arguments, number of parameters)`` after each launch."""
    _thread.told = told
    try:
        yield
    finally:
        _thread.told = None


def telling() -> bool:
    """Whether launches are told of in this thread."""
    return getattr(_thread, "told", None) is not None


@triton.jit
def dot(a, b, acc, C: tl.constexpr):
    """acc + a @ b in C.PRECISION. The interpreter's product of bfloat16 matrices is wrong: there, multiply in float32.

    It takes the whole of C: Triton 3.6 passes no string to a function.
    """
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=C.PRECISION)


@triton.jit
def steps_of(x, stride):
    """x times the stride, which None says is 1: known when compiled, so that loads along it are wide."""
    if stride is not None:
        x = x * stride
    return x


@triton.jit
def apart_from_products(b_mask, C: tl.constexpr):
    """Bytes that decide which elements of a product's operand are 0, as integers that the compiler does not follow back to their load.

    Triton 3.6 lays out the operands of mma.sync for the narrowest load they come from, and twice as wide if they come through tl.join, as
    those of the dropout mask do: with bytes, 4 threads of 8 numbers (kWidth 8) share out K, though there be only 16. Then two threads
    have what the others have: on an H100 d_key and d_value of 16-bit masked attention with dropout were wrong. A maximum over an axis of
    one, which no layout is carried through, leaves kWidth 4. Source: triton-lang/triton#10645, #11691.
    """
    x = b_mask.to(tl.int32)
    if C.DROPOUT and C.BM < 32:  # K is BM or BN, and BN is at least 32
        x = tl.max(tl.expand_dims(x, -1), -1)
    return x


@triton.jit
def not_negative(x, like):
    """Whether the number x is 0 or more, as the mask of a load of pointers `like`. The interpreter of Triton 3.9 spreads what a number's
    comparison gives as integers, which loads refuse: there, spread the number."""
    if INTERPRET:
        x = tl.zeros(like.shape, tl.int64) + x
    return x >= 0


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x rounded to dtype, to nearest even. The interpreter would cut bfloat16 off: there, round before."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def divided(a, b):
    """a / b to the nearest, of a block by a number or a block: `/` of float32 is div.full on NVIDIA's GPUs, off by up to two units."""
    return tl.div_rn(a, tl.zeros_like(a) + b)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x) of float32, within 0.51 of a unit: two roundings would be a whole one. A step of Newton's method, whose residual
    1 - x y^2 keeps the rounding error of x y."""
    y = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))
    root = x * y
    residual = tl.fma(-root, y, 1.0) - tl.fma(x, y, -root) * y
    better = tl.fma(0.5 * residual, y, y)
    return tl.where(better == better, better, y)  # of 0 and infinity


@triton.jit
def tanh(x):
    """To 2e-7 relative: the odd polynomial x + x^3 P(x^2) below 0.6 (fitted for this), 1 - 2 / (1 + e^2x) above."""
    z = x * x
    p = z * -0.005894480914075617 + 0.020795446692862346
    p = p * z - 0.05378369286235975
    p = p * z + 0.1333192275238217
    p = p * z - 0.3333329796161276
    size = tl.abs(x)
    large = 1.0 - 2.0 / (1.0 + tl.exp2(size * (2 * LOG2E)))
    return tl.where(size < 0.6, x + x * z * p, tl.where(x < 0, -large, large))


def precision(dtype: torch.dtype) -> str:
    """Of ``dot``: TF32 for float32 where PyTorch may use it, by either of its switches. Reading the old one, ``allow_tf32``, raises
    once the new one was used; the new one, ``fp32_precision``, says what both were told."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# ---- dropout: see pytransformer.reference.philox for the layout


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Philox-4x32-7. Products of 64 bits are one instruction each, where a high and a low one of 32 bits are two."""
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
    """Indices counted from ``start``; None is 0, and no code: a sum that is not needed cost a kernel 8 bytes of stack."""
    if start is not None:
        i = i + start
    return i


@triton.jit
def keep_tile(seed, c1, c2, c3, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """int1 [BM, BN], True = keep, of the tile whose first column has the absolute index j0 (j0 % 32 == 0). c1, c2, c3 are the
    other counter words, each a number or [BM, 1]: row, head, batch in attention; row low, row high, tag elsewhere.

    One call per row and eight columns, then a permutation. With queries as rows the compiler carries the accumulator's
    layout back through it, so it moves no data; of a transposed tile it would.
    """
    tl.static_assert(BN % 32 == 0)
    group = (j0 // 8 + tl.arange(0, BN // 8)).to(tl.uint32)[None, :]
    zero = tl.zeros([BM, BN // 8], tl.uint32)
    w0, w1, w2, w3 = philox(zero + group, zero + c1.to(tl.uint32), zero + c2.to(tl.uint32), zero + c3.to(tl.uint32), seed)
    w = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [BM, BN / 8, t % 2, t // 2]
    w = tl.join(w << 16, w)  # the draw in the high half: no mask, no shift for the odd keys
    w = tl.reshape(w, [BM, BN // 32, 4, 2, 2, 2])  # rows, j // 32, (j % 8) // 2, t % 2, t // 2, j % 2
    w = tl.reshape(tl.permute(w, (0, 1, 4, 3, 2, 5)), [BM, BN])
    return w >= (tl.cast(threshold, tl.uint32) << 16)
