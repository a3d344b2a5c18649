# SPDX-License-Identifier: Apache-2.0
"""Every family's kit, found by its file in `ops/`: adding one edits nothing here."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ..ops._core.registry import OPS
from . import ops as folder
from .kit import Kit


@functools.cache
def kits() -> dict[str, Kit]:
    """By family."""
    families = sorted(found.name for found in pkgutil.iter_modules(folder.__path__))
    return {family: importlib.import_module(f"{folder.__name__}.{family}").KIT for family in families}


def ops() -> tuple[str, ...]:
    """The public ops that have a kit, family by family."""
    return tuple(name for family in kits() for name, op in OPS.items() if op.family == family)


def kit_of(op: str) -> Kit:
    """The kit of the op's family."""
    return kits()[OPS[op].family]
