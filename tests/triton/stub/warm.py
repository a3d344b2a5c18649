# SPDX-License-Identifier: Apache-2.0
"""Warm calls launch the same as cold ones: uncached, by kernels/_launch.py, by the C++ fast path.

python tests/triton/stub/warm.py --arch 90 --cases 2 --random 20      every second case, 20 random
                                                                      problems per op

The stub's arguments are compared: kernels, grids, numbers and addresses. An input's address is
replaced by its index, other memory by the order of its first use in the direction; in an uncached
call, by the order within each launch, because freed tensors make room for others. All problems run
in one process, so a call that is confused with another is detected too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import Gpu, Lowered
from launches import DRAWN, DTYPES, FUSED, SEED, differentiated, run_random, smallest

import pytransformer as pt
from pytransformer.kernels import _launch
from pytransformer.ops._core import fast_path
from pytransformer.ops._core.op import Op
from pytransformer.testing.cases import cases, leaves

Arrived = list[tuple[Any, ...]]
# Named cases have positions, whose tables Python computes on a GPU; `steps` has tables.
WITHOUT_FAST_PATH = ("rotary ", "append_kv ")


class Noted(dict[Any, Any]):
    """The entries of _launch._known that calls hit."""

    found: list[Any]

    def get(self, key: Any, default: Any = None) -> Any:
        self.found.append(super().get(key, default))
        return self.found[-1]


def _is_backward(kernel: str) -> bool:
    return "backward" in kernel or "mask_" in kernel


class Watch:
    """Records the arguments, launch by launch."""

    def __init__(self, gpu: Gpu) -> None:
        self.arrived: Arrived = []
        self.compiled: dict[Lowered, int] = {}  # each with Triton's specialization of its arguments
        self.noted = _launch._known = Noted()
        check = gpu.check

        def checked(kernel: Lowered, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            check(kernel, grid, arguments)
            values = tuple(gpu.stub.values[: len(kernel.parameters)])
            name = (
                f"{kernel.fn.fn.__name__}, compiled"
                f" {self.compiled.setdefault(kernel, len(self.compiled))}"
            )
            self.arrived.append((name, grid, tuple(zip(kernel.parameters, values))))

        gpu.check = checked  # type: ignore[method-assign]
        self.in_python = 0  # bodies of raw ops that Python ran
        for name in ("run", "run_backward"):
            setattr(Op, name, self.counted(getattr(Op, name)))

    def counted(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.in_python += 1
            return body(*args, **kwargs)

        return run

    def of(self, call: Callable[[], None]) -> bool:
        """Record the call; return True if all its launches were stored ones."""
        self.arrived, self.noted.found, self.in_python = [], [], 0
        call()
        return bool(self.noted.found) and all(
            isinstance(found, _launch.Replay) for found in self.noted.found
        )

    def told(self, inputs: list[torch.Tensor], whole: bool) -> Arrived:
        """Return the arguments with names for addresses, of the full call or of each launch."""
        given = {t.data_ptr(): f"input {i}" for i, t in enumerate(inputs)} | {0: "null"}
        names = dict(given)

        def value(kind: str, bits: int) -> Any:
            return (
                names.setdefault(bits, f"memory {len(names)}")
                if kind.startswith("!tt.ptr")
                else bits
            )

        lines: Arrived = []
        for name, grid, parameters in self.arrived:
            # A mask's blocks are listed first, in each direction.
            earlier = lines[-1][0] if lines else "mask_"
            turned = (
                "forward" in earlier or "combine" in earlier
                if "mask_" in name
                else _is_backward(name) and not _is_backward(earlier)
            )
            names = names if whole and not turned else dict(given)
            lines.append((name, grid, tuple(value(*each) for each in parameters)))
        return lines


def named(case: Any, dtype: torch.dtype) -> tuple[Callable[[], None], list[torch.Tensor]]:
    args, kwargs = case.make("cpu", dtype, seed=0, requires_grad=True)
    found = leaves(case.op, args, kwargs)
    kwargs |= {"dropout_seed": torch.tensor(5)} if kwargs.get("dropout_p") else {}
    return lambda: differentiated(
        getattr(pt, case.op)(*args, **kwargs, backend="triton"), found.values()
    ), [*found.values()]


def neighbours() -> Iterator[tuple[str, Callable[[], None], list[torch.Tensor]]]:
    """Yield calls that differ in one relevant argument."""

    def attention(
        name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> Any:
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        inputs = [inputs[0]] * 3 if q is k else inputs
        given = [*inputs, *(t for t in options.values() if isinstance(t, torch.Tensor))]
        return (
            name,
            lambda: differentiated(
                pt.attention(*inputs, backend="triton", **options), inputs[: 1 if q is k else 3]
            ),
            given,
        )

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    q, k, v = ones(2, 4, 40, 32), ones(2, 4, 40, 32), ones(2, 4, 40, 32)
    yield attention("one tensor", q, q, q)
    yield attention("key is value", q, k, k)
    yield attention("as it is", q, k, v)
    yield attention("rows apart", ones(2, 40, 4, 32).transpose(1, 2), k, v)
    yield attention("rows far apart", ones(2, 4, 40, 64)[..., :32], k, v)
    yield attention("off 16 bytes", ones(2 * 4 * 40 * 32 + 1)[1:].view(q.shape), k, v)
    yield attention("another dtype", q.half(), k.half(), v.half())
    yield attention("a scale", q, k, v, scale=0.5)
    yield attention("another scale", q, k, v, scale=0.25)
    yield attention("causal", q, k, v, causal="top_left")
    yield attention("causal to the end", q, k, v, causal="bottom_right")
    for name, mask in (
        ("a mask", ones(40, 40)),
        ("a mask of rows", ones(1, 40)),
        ("a bool mask", ones(40, 40).bool()),
    ):
        yield attention(name, q, k, v, attn_mask=mask)


def steps() -> Iterator[tuple[str, Callable[[], None], list[torch.Tensor]]]:
    """Run a layer's decoding step, with one cos and sin table for all layers."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    tables, positions, weight = torch.randn(2, 2, 1, 32), torch.tensor([[9], [14]]), drawn(32)
    q, k, v = drawn(2, 4, 1, 32), drawn(2, 2, 1, 32), drawn(2, 2, 1, 32)
    x = drawn(2, 4, 1, 32).requires_grad_()
    cos, sin = tables
    turn = lambda: differentiated(pt.rotary(x, cos=cos, sin=sin, backend="triton"), [x])
    yield "rotary, tables", turn, [x, cos, sin]
    for name, page_size in (("append_kv, buffers", None), ("append_kv, pages of 8", 8)):
        first, rows = (2, 16) if page_size is None else (4, page_size)
        table = None if page_size is None else torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
        cache = pt.KeyValues(drawn(first, 2, rows, 32), drawn(first, 2, rows, 32), table)

        def append(cache: pt.KeyValues = cache) -> None:
            pt.append_kv(
                q, k, v, cache, positions, rotary=(cos, sin), k_norm=weight, backend="triton"
            )

        yield (
            name,
            append,
            [q, k, v, *(t for t in cache if t is not None), positions, cos, sin, weight],
        )


def known() -> tuple[int, int]:
    """Return the numbers of call classes that launch stored programs and of uncached ones."""
    entries = [*_launch._known.values()]
    return sum(isinstance(entry, _launch.Replay) for entry in entries), entries.count(_launch.NEVER)


TIMES = 4  # Python runs a call class once and records it once, and forward precedes backward


def check(watch: Watch, call: Callable[[], None], inputs: list[torch.Tensor]) -> bool:
    """Check that every path launches the same; return True if the fast path did the last call."""

    def same(time: str, whole: bool) -> None:
        got = watch.told(inputs, whole)
        if got != expected[whole]:
            pairs = [pair for pair in zip(expected[whole], got) if pair[0] != pair[1]]
            raise AssertionError(
                f"{time}: {len(got)} launches for {len(expected[whole])}: {pairs[:1]}"
            )

    with _launch.cold():
        watch.of(call)
    expected = {whole: watch.told(inputs, whole) for whole in (False, True)}
    with fast_path.off():
        for time in range(TIMES):
            whole = watch.of(call)
            same(f"call {time + 1}", whole)
    for _ in range(TIMES):
        watch.of(call)
    same("by the fast path", whole and not watch.in_python)
    return not watch.in_python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--cases", type=int, default=1, help="each case in so many; 0: none")
    parser.add_argument("--random", type=int, default=0, help="problems of each op")
    parser.add_argument(
        "--dtypes", type=int, default=1, help="how many of bfloat16, float16, float32"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    todo = [
        (name, lambda call=call, i=inputs: differentiated(call(), i), [*inputs])
        for name, call, inputs in smallest()
    ]
    todo += [*neighbours(), *steps()]
    for case in (
        [c for c in cases() if c.op not in FUSED][:: options.cases] if options.cases else ()
    ):
        todo += [(f"{case.op} {case.name} {d}", *named(case, d)) for d in DTYPES[: options.dtypes]]
    for op in DRAWN:
        todo += [
            (f"{op} {SEED} {n}", lambda op=op, n=n: run_random(op, n), [])
            for n in range(options.random)
        ]
    with tempfile.TemporaryDirectory() as folder:
        gpu = Gpu(options.arch, Path(folder))
        watch, failures = Watch(gpu), 0
        # The fuzzers poison memory, which then has another allocator: only the other calls test
        # stored launches and the fast path.
        done: list[bool] = []  # if the fast path runs
        counts = (0, 0)
        for name, call, inputs in todo:
            try:
                paths = check(watch, call, inputs)
                counts = known() if inputs else counts
                # The fast path leaves calls with block masks to Python, and does not have every op.
                counted = (
                    bool(inputs) and "block" not in name and not name.startswith(WITHOUT_FAST_PATH)
                )
                done += [paths] if counted else []
                if counted and not paths:
                    print(f"{name}: not by the fast path")
            except Exception:
                failures += 1
                print(f"{name}: {traceback.format_exc(limit=3)}")
        programs, reasons = fast_path.programs()
        kept, never = counts
        print(
            f"{len(todo)} calls, {gpu.launches} launches, {failures} wrong; but for random ones"
            f" {kept} kept, {never} worked out each time"
        )
        print(
            f"{sum(done)} of {len(done)} named calls by the fast path, {programs} programs, not"
            f" recorded: {dict(Counter(reasons))}"
        )
        print(*gpu.wrong[:20], sep="\n")
        few = kept < 4 * never or (fast_path.why_not() is None and 10 * sum(done) < 9 * len(done))
        return 1 if failures or gpu.wrong or few else 0


if __name__ == "__main__":
    sys.exit(main())
