# SPDX-License-Identifier: Apache-2.0
"""Raise if this folder is an unbuilt checkout that hides an installed package.

Python puts the working directory first on its path. In a clone, after ``pip install .``, it would
import the sources, which have no compiled kernels, and every call would be slow without a word.
"""

from importlib.metadata import distributions
from pathlib import Path

DISTRIBUTION = "pytransformer-kernels"
PACKAGE = Path(__file__).parent


def installed_elsewhere() -> Path | None:
    """Return the folder of an installed package other than this one, or None."""
    for distribution in distributions(name=DISTRIBUTION):
        package = Path(str(distribution.locate_file("pytransformer")))
        if (package / "__init__.py").is_file() and not package.samefile(PACKAGE):
            return package
    return None


if not (PACKAGE / "_build_info.json").exists() and (package := installed_elsewhere()) is not None:
    raise ImportError(
        f"pytransformer: imported from {PACKAGE}, sources without compiled kernels, although the"
        f" package is installed in {package}; start Python in another folder, set PYTHONSAFEPATH=1,"
        " or build the checkout (make build)"
    )
