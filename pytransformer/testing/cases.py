# SPDX-License-Identifier: Apache-2.0
"""Named problems shared by tests and benchmarks, so that every timed problem is also tested.

A `Case` is an operation, a shape and an argument builder:

    for case in cases("attention", size="small"):
        args, kwargs = case.make("cpu", torch.bfloat16, seed=0)
        out = getattr(pytransformer, case.op)(*args, **kwargs)

`case.resize(Lq=4096, Lk=4096)` returns the same problem at another shape. `leaves(case.op, args,
kwargs)` returns the tensors that get a gradient. `case.flops()` and `case.bytes(dtype)` are the
work that a benchmark divides by. `ops/<family>.py` has the cases of a family.
"""

from __future__ import annotations

from .case import FORWARD_ONLY as FORWARD_ONLY
from .case import Case as Case
from .case import leaves as leaves
from .kits import kits, ops

APART = "apart"  # the tag of cases with separate tests; verify and benchmarks request them
DIMENSIONS = ("B", "Hq", "Hkv", "Lq", "Lk", "D", "rows", "d", "hidden", "classes")
SIZES: dict[str, dict[str, int]] = {
    name: dict(zip(DIMENSIONS, sizes))
    for name, sizes in {
        "small": (2, 4, 4, 67, 67, 32, 37, 96, 200, 131),  # odd lengths give every tile a tail
        "medium": (2, 8, 8, 512, 512, 64, 1024, 512, 2048, 4096),
        "large": (1, 16, 16, 2048, 2048, 64, 8192, 1024, 4096, 32000),
    }.items()
}


def cases(op: str | None = None, size: str = "small", tags: set[str] | None = None) -> list[Case]:
    """Return the cases of a size, of one op, or with all of `tags`.

    Cases tagged APART are included only on request.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {sorted(SIZES)}, got {size!r}")
    if op is not None and op not in ops():
        raise ValueError(f"op must be one of {sorted(ops())}, got {op!r}")
    wanted = frozenset(tags or ())
    return [
        c
        for c in _all(size)
        if op in (None, c.op) and wanted <= c.tags and (APART not in c.tags or APART in wanted)
    ]


def _all(size: str) -> list[Case]:
    return [case for kit in kits().values() for case in kit.cases(SIZES[size])]


def case(name: str, size: str = "small") -> Case:
    """Return the case with that name."""
    found = {c.name: c for c in _all(size)}
    if name not in found:
        raise ValueError(f"case must be one of {sorted(found)}, got {name!r}")
    return found[name]
