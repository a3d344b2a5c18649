# SPDX-License-Identifier: Apache-2.0
"""The tasks of `pytransformer train`: each file of this folder is a task.

A task's module has a docstring and two functions. The docstring's first line is the summary and its
full text is the help.

    add_arguments(parser)    adds its options; cli/train.py adds the common ones
    train(run)               builds data and models, trains them with `run.fit`
                             and ends with `run.report`

`run` is a :class:`pytransformer.cli.training_run.Run`. Import slow modules inside functions only,
because `--help` imports every task.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """Return the tasks in alphabetical order."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )


def module(name: str) -> ModuleType:
    """Return the task's module."""
    return importlib.import_module(f"{__name__}.{name}")
