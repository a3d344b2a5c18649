# SPDX-License-Identifier: Apache-2.0
"""Every stem's kit, found by its file in `ops/`: adding one edits nothing here."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ..ops._core.registry import OPS
from . import ops as folder
from .kit import Kit


@functools.cache
def kits() -> dict[str, Kit]:
    """By stem."""
    stems = sorted(found.name for found in pkgutil.iter_modules(folder.__path__))
    return {stem: importlib.import_module(f"{folder.__name__}.{stem}").KIT for stem in stems}


def ops() -> tuple[str, ...]:
    """The public ops that have a kit, stem by stem."""
    return tuple(name for stem in kits() for name, op in OPS.items() if op.stem == stem)


def kit_of(op: str) -> Kit:
    """The kit of the op's stem."""
    return kits()[OPS[op].stem]
