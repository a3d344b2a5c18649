# SPDX-License-Identifier: Apache-2.0
"""Kernels with one fault: an edit of a kernel's source, in force for the length of a block.

with mutated("layer_norm", "bwd.py", "b_gx", "b_gm", folder):
    pytransformer.layer_norm(..., backend="triton")   # interpreted
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pytransformer import kernels


@contextlib.contextmanager
def mutated(family: str, file: str, old: str, new: str, folder: Path) -> Iterator[None]:
    """Load kernels/<family> from a copy in ``folder`` with ``old`` replaced by ``new`` in ``file``.

    ``old`` must occur.
    """
    package = f"{kernels.__name__}.{family}"
    importlib.import_module(package)
    copy = folder / family
    shutil.copytree(
        Path(kernels.__path__[0]) / family, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    source = (copy / file).read_text()
    if old not in source:
        raise ValueError(f"{family}/{file} does not hold {old!r}: name the line as it is now")
    (copy / file).write_text(source.replace(old, new, 1))
    real = {
        n: sys.modules.pop(n)
        for n in list(sys.modules)
        if n == package or n.startswith(package + ".")
    }
    spec = importlib.util.spec_from_file_location(
        package, copy / "__init__.py", submodule_search_locations=[str(copy)]
    )
    try:
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
        yield
    finally:
        for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
            del sys.modules[name]
        sys.modules.update(real)
        setattr(kernels, family, real[package])
