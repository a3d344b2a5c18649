# SPDX-License-Identifier: Apache-2.0
"""Every family's kit, loaded from its file in `ops/`; a new family edits nothing here."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ..ops._core.registry import OPS
from . import ops as folder
from .kit import Kit


@functools.cache
def kits() -> dict[str, Kit]:
    """Return the families' kits by name."""
    families = sorted(found.name for found in pkgutil.iter_modules(folder.__path__))
    return {
        family: importlib.import_module(f"{folder.__name__}.{family}").KIT for family in families
    }


def ops() -> tuple[str, ...]:
    """Return the public ops with a kit, family by family."""
    return tuple(name for family in kits() for name, op in OPS.items() if op.family == family)


def kit_of(op: str) -> Kit:
    """Return the kit of the op's family."""
    return kits()[OPS[op].family]
