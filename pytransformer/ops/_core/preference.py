# SPDX-License-Identifier: Apache-2.0
"""The order in which backends are tried, on a GPU by measured times.

preferences.csv contains measured kernel times on GPUs by op, direction, dtype, kind, size (the last
dimension) and length (keys, or rows); bench/tools/preferences.py writes it from committed results.
A call uses the nearest row. Backends without a verification result come last, so that a call does
not wait for a check while a verified backend can compute it. See docs/design/verification.md.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import verification
from .backend import BACKENDS
from .verification import number

if TYPE_CHECKING:
    from .registry import Op

TABLE = Path(__file__).with_name("preferences.csv")
MARGIN = 1.03  # noise: a faster backend must win by more to precede BACKENDS' order
# Kinds with similar kernels; the first of a group replaces an unmeasured kind of it.
GROUPS = (
    ("full", "causal", "window", "padding", "packed"),
    ("mask", "bias", "t5", "alibi", "dropout"),
    ("one query", "pages"),
)
OTHER_KIND, OTHER_GROUP, OTHER_DTYPE, OTHER_WIDTH, PER_DOUBLING = 20.0, 60.0, 1.0, 8.0, 1.0
HIDING_MS = 0.1  # Python calls PyTorch's kernels, and a shorter call does not hide that

# a backend and, if the time belongs to one of its kernels, that kernel
Entry = tuple[str, str | None]


@dataclass(frozen=True)
class Cell:
    """The kind of a call, as far as preferences distinguish calls."""

    op: str
    direction: str  # "fwd" or "bwd"
    dtype: str
    kind: str
    size: int
    length: int  # rounded up to a power of two


@dataclass(frozen=True)
class Row:
    """Measured times of a cell in milliseconds."""

    cell: Cell
    times: dict[Entry, float]

    def order(self) -> list[Entry]:
        """Return the measured entries, fastest first, in BACKENDS' order within MARGIN."""
        rest, ordered = sorted(self.times, key=lambda e: BACKENDS.index(e[0])), []
        while rest:
            limit = min(self.times[e] for e in rest) * MARGIN
            ordered.append(next(e for e in rest if self.times[e] <= limit))
            rest.remove(ordered[-1])
        return ordered


@functools.cache
def table() -> dict[str, list[Row]]:
    """Return the rows by compute capability, "sm_90"."""
    rows: dict[str, list[Row]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            cell = Cell(
                line["op"], line["direction"], line["dtype"], line["kind"],
                int(line["size"]), int(line["length"]),
            )  # fmt: skip
            pairs = (item.split("=") for item in line["ms"].split())
            times = {entry(name): float(ms) for name, ms in pairs}
            rows.setdefault(line["arch"], []).append(Row(cell, times))
    return rows


def entry(text: str) -> Entry:
    """Parse "cuda" or "torch:cudnn"."""
    name, _, kernel = text.partition(":")
    return name, kernel or None


def cell_of(op: Op, a: Any, direction: str) -> Cell:
    first = a[0]
    kind = getattr(a, "kind", "")
    last = max(1, number(first.shape[-1]))
    if kind in GROUPS[2]:  # bound by the bytes of all keys
        length = number(a.sequences) * number(a.key_heads) * number(a.num_keys)
    elif kind:
        length = number(a.num_keys)
    else:
        length = number(first.numel()) // last
    # few classes, because the order of each is cached
    length = 1 << (max(1, length) - 1).bit_length()
    return Cell(op.name, direction, str(first.dtype)[6:], kind, last, length)


def distance(cell: Cell, row: Cell) -> float:
    """Return the dissimilarity of two cells of one op and direction."""
    far = PER_DOUBLING * (
        2 * abs(math.log2(cell.size / row.size)) + abs(math.log2(cell.length / row.length))
    )
    if cell.kind != row.kind:
        alike = any(cell.kind in group and row.kind in group for group in GROUPS)
        stands_in = any(row.kind == group[0] for group in GROUPS)
        far += (OTHER_KIND if alike else OTHER_GROUP) - stands_in
    if cell.dtype != row.dtype:
        halves = {cell.dtype, row.dtype} == {"bfloat16", "float16"}
        far += OTHER_DTYPE if halves else OTHER_WIDTH
    return far


def measured(arch: str, cell: Cell, family: str, deterministic: bool) -> list[Entry]:
    """Return the entries of the nearest row, fastest first, or [] if the op was not measured.

    PyTorch's kernels choose their splits by the batch, so a sequence's result may depend on its
    neighbors. They come first only for calls with ``deterministic=False``.
    """
    if not table():
        return []
    rows = table()[min(table(), key=lambda known: abs(_number_of(known) - _number_of(arch)))]
    rows = [row for row in rows if row.cell.direction == cell.direction]
    rows = [row for row in rows if row.cell.op == cell.op] or [
        r for r in rows if r.cell.op == family
    ]
    if not rows:
        return []
    row = min(rows, key=lambda row: distance(cell, row.cell))
    scaled = cell.length / row.cell.length
    return [
        e
        for e in row.order()
        if e[0] != "torch" or (not deterministic and row.times[e] * scaled >= HIDING_MS)
    ]


def _number_of(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


@functools.cache
def arch_of(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def ordered(op: Op, a: Any, direction: str) -> Iterable[Entry]:
    """Return the op's backends in the order in which they are tried for this call."""
    device = a[0].device
    if device.type != "cuda":
        names = cpu_order(op, device.type) if verification.measured_order else op.backends
        return zip(names, itertools.repeat(None))
    cell, deterministic = cell_of(op, a, direction), getattr(a, "deterministic", True)
    size = verification.size_class(a)
    return _gpu_order(
        op.name, op.family, tuple(op.backends), device, a[0].dtype, size, cell, deterministic,
        verification.mode(), verification.version[0],
    )  # fmt: skip


def cpu_order(op: Op, device: str = "cpu") -> list[str]:
    """Return the op's default order, or the order that `pytransformer verify` measured."""
    order = verification.measured_order.get((op.name, device), ())
    return [n for n in order if n in op.backends] + [n for n in op.backends if n not in order]


@functools.lru_cache(1024)
def _gpu_order(
    op: str, family: str, backends: tuple[str, ...], device: torch.device, dtype: torch.dtype,
    size: int,
    cell: Cell, deterministic: bool, _mode: str, _version: int,
) -> list[Entry]:  # fmt: skip
    arch = arch_of(device)
    entries = measured(arch, cell, family, deterministic)
    order = verification.measured_order.get((op, device.type), ())
    if order and arch not in table():  # this machine's measurement before a neighbor's
        entries = [entry(name) for name in order]
    entries = [e for e in entries if e[0] in backends]
    known = {name for name, kernel in entries if kernel is None}
    entries += [(name, None) for name in backends if name not in known]
    # sorted() is stable: verified backends first, each part in its order; the reference is last.
    return sorted(
        entries,
        key=lambda e: (
            e[0] == "reference",
            not verification.is_known(op, e[0], device, dtype, size),
        ),
    )
