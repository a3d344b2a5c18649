# SPDX-License-Identifier: Apache-2.0
"""What `pytransformer train` can learn: a task is a file of this folder, found by being here.

A task's module has a docstring, whose first line is its summary and whose whole is its help, and two functions:

    add_arguments(parser)        its own options; those of every task are added by cli/train.py
    train(run)                   makes data and models, trains them with `run.fit`, and ends with `run.report`

`run` is a :class:`pytransformer.cli.training_run.Run`. Modules import torch's slow companions inside functions only: `--help` reads
every task.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """The tasks, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def module(name: str) -> ModuleType:
    """The task's module."""
    return importlib.import_module(f"{__name__}.{name}")
