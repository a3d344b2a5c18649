# SPDX-License-Identifier: Apache-2.0
"""Optional libraries, imported when they are needed, with an error that says how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports `module`, which comes with the extra `extra`.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"pip install 'pytransformer-kernels[{extra}]'"
        ) from error
