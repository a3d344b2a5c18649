# SPDX-License-Identifier: Apache-2.0
"""What the tests of training share."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import pytransformer

PATH = Path(__file__).with_name("toy.py")


@pytest.fixture(scope="session")
def toy():
    """The module toy.py; tests are not importable by name."""
    spec = importlib.util.spec_from_file_location("toy", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def portuguese():
    """The module examples/portuguese.py."""
    path = Path(__file__).resolve().parents[2] / "examples" / "portuguese.py"
    spec = importlib.util.spec_from_file_location("portuguese", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def subprocess_environment():
    """The environment of a process that is to find this very package, and nothing in the working directory."""
    paths = [str(Path(pytransformer.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    """Everything here is tiny."""
