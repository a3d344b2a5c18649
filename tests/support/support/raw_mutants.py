# SPDX-License-Identifier: Apache-2.0
"""Random wrong variants of raw calls.

A worker process runs them on tensors that end at a guard page, so that an out-of-bounds access ends
the process:

    failures = run_mutants(2000)     # seed, op and signal of each crash or ten-second timeout
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytransformer.ops._core import fast_path, native

from .raw_calls import RawCall, corpus, freed

SECONDS = 10  # for one call

INTEGERS = (
    *(0, 1, -1, 2, 3, 31, 32, 33, 127, -128, 512, 513, 2**15, 2**31 - 1, 2**31, -(2**31)),
    *(2**32, 2**32 + 1, 2**40, 2**59 + 1, 2**61, 2**62, 2**63 - 1, -(2**63)),
)
FLOATS = (0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, 0.5, 1 - 1e-9)
DTYPES = (
    *(
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    ),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn),
)
WORDS = (
    "none",
    "top_left",
    "bottom_right",
    "",
    "relu",
    "silu",
    "cpu",
    "reference",
    "torch",
    "triton",
    "x",
)


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 3, tuple(min(n, 600) for n in shape)).to(dtype)


def _reshaped(t: Tensor, rng: random.Random) -> Tensor:
    shape = list(t.shape)
    change = rng.choice(("resize", "resize", "resize", "empty", "add", "drop"))
    if change == "add" or not shape:
        shape.insert(rng.randint(0, len(shape)), 1)
    elif change == "drop":
        del shape[rng.randrange(len(shape))]
    else:
        at = rng.randrange(len(shape))
        n = shape[at]
        shape[at] = (
            0
            if change == "empty"
            else max(0, rng.choice((n - 1, n + 1, 2 * n, n // 2, 0, 1, 2, 16, 513)))
        )
    return _random(shape, t.dtype)


def _restrided(t: Tensor, rng: random.Random) -> Tensor:
    if t.dim() < 2 or not t.numel():
        return t
    first, second = rng.sample(range(t.dim()), 2)
    how = rng.choice(("transposed", "gaps", "shared"))
    if how == "transposed":
        return t.transpose(first, second).contiguous().transpose(first, second)
    if how == "shared":
        return t.narrow(first, 0, 1).expand(t.shape)
    return torch.repeat_interleave(t, 2, dim=first)[
        (slice(None),) * first + (slice(None, None, 2),)
    ]


def _revalued(t: Tensor, rng: random.Random) -> Tensor:
    t = t.contiguous().clone()
    if not t.numel() or t.dtype not in (torch.int64, torch.int32, torch.float32):
        return t
    flat, limits = t.view(-1), torch.iinfo(t.dtype) if not t.is_floating_point() else None
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(INTEGERS if limits else FLOATS)
        flat[rng.randrange(t.numel())] = (
            value if limits is None else max(limits.min, min(limits.max, value))
        )
    return t


def _wrong_tensor(t: Tensor | None, args: Sequence[Any], rng: random.Random) -> Any:
    if t is None:
        given = [a for a in args if isinstance(a, Tensor)]
        return rng.choice(
            (
                rng.choice(given or [None]),
                _random([rng.choice((1, 2, 4, 8))] * rng.randint(0, 4), rng.choice(DTYPES)),
            )
        )
    if t.numel() and not t.untyped_storage().nbytes():
        return t  # an earlier mutation freed it; PyTorch itself would read the missing storage
    kind = rng.choice(
        (
            "none",
            "shape",
            "shape",
            "dtype",
            "strides",
            "values",
            "values",
            "another",
            "freed",
            "meta",
        )
    )
    if kind == "none":
        return None
    if kind == "another":
        return rng.choice([a for a in args if isinstance(a, Tensor)] or [t])
    if kind == "dtype":
        return t.to(rng.choice(DTYPES))
    if kind == "freed":
        return freed(t) if t.numel() else t
    if kind == "meta":
        return t.to("meta")
    return {"shape": _reshaped, "strides": _restrided, "values": _revalued}[kind](t, rng)


def mutated(call: RawCall, rng: random.Random) -> RawCall:
    """Return the call with one to three arguments changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        at = rng.randrange(len(call.args))
        value = call.args[at]
        if value is None or isinstance(value, Tensor):
            value = _wrong_tensor(value, call.args, rng)
        elif isinstance(value, bool):
            value = not value
        elif isinstance(value, int):
            value = rng.choice((*INTEGERS, value + 1, value - 1))
        elif isinstance(value, float):
            value = rng.choice(FLOATS)
        elif isinstance(value, str):
            value = rng.choice(WORDS)
        else:
            value = [
                rng.random() < 0.5 for _ in range(max(0, len(value) + rng.choice((-1, 0, 0, 1))))
            ]
        call = call.replace(at, value)
    return call


# ---- guard pages

PAGE, SLOT, SLOTS = mmap.PAGESIZE, 1 << 18, 64


class Guarded:
    """Memory slots between inaccessible pages."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SLOTS * (SLOT + PAGE) + PAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for n in range(SLOTS + 1):
            assert protect(self.base + n * (SLOT + PAGE), PAGE, 0) == 0

    def place(self, slot: int, t: Tensor, at_end: bool) -> Tensor:
        """Return a copy with the same strides that ends or begins at a guard page.

        Without room, the tensor itself is returned.
        """
        count = 0 if 0 in t.shape else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        size = count * t.element_size()
        if (
            t.device.type != "cpu"
            or not 0 < size <= SLOT
            or slot >= SLOTS
            or not t.untyped_storage().nbytes()
        ):
            return t
        start = self.base + PAGE + slot * (SLOT + PAGE) + (SLOT - size if at_end else 0)
        flat = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=t.dtype)
        flat.copy_(t.as_strided((count,), (1,)))
        return flat.as_strided(t.shape, t.stride())

    def placed(self, call: RawCall, rng: random.Random) -> RawCall:
        """Return the call with its tensors in guarded memory; a repeated tensor stays shared."""
        known: dict[int, Tensor] = {}
        for a in call.args:
            if isinstance(a, Tensor) and id(a) not in known:
                known[id(a)] = self.place(len(known), a, rng.random() < 0.7)
        return call._replace(args=tuple(known.get(id(a), a) for a in call.args))


# ---- the worker and its parent


def worker(first: int, last: int) -> None:
    """Run the variants with these seeds; print each seed and op before the call."""
    torch.set_num_threads(1)
    native.why_not("attention_fwd")
    fast_path.why_not()
    calls, guarded = corpus(), Guarded()
    by_op: dict[tuple[str, str], list[RawCall]] = {}
    for call in calls:
        by_op.setdefault(call[:2], []).append(call)
    for seed in range(first, last):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        call = rng.choice(by_op[rng.choice(sorted(by_op))])
        # PyTorch cannot build some mutations
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            call = mutated(call, rng)
        call = guarded.placed(call, rng)
        print(json.dumps([seed, call.namespace, call.op]), flush=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # the default action ends the process
        with contextlib.suppress(Exception):
            call.run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    print("done", flush=True)


def run_mutants(count: int, first: int = 0, max_failures: int = 10) -> list[str]:
    """Return the failures among these seeds, with the signal that ended each process."""
    failures: list[str] = []
    last = first + count
    while first < last and len(failures) < max_failures:
        code = f"from {__name__} import worker; worker({first}, {last})"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        lines = process.stdout.splitlines()
        if lines and lines[-1] == "done":
            break
        if not lines:
            failures.append(f"the worker did not start: {process.stderr[-2000:]}")
            break
        seed, namespace, op = json.loads(lines[-1])
        ended = (
            signal.Signals(-process.returncode).name
            if process.returncode < 0
            else f"exit {process.returncode}"
        )
        failures.append(f"seed {seed}: {namespace}::{op} ended by {ended}: {process.stderr[-500:]}")
        first = seed + 1
    return failures
