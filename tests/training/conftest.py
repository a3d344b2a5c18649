# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the training tests."""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
from pathlib import Path

import pytest

import pytransformer

PATH = Path(__file__).with_name("toy.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # tests import train.py and training_tasks
HEADER = {
    "": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n"
}


@pytest.fixture(scope="session")
def toy():
    """Load the module toy.py; tests are not importable by name."""
    spec = importlib.util.spec_from_file_location("toy", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def portuguese():
    """Load the module examples/portuguese.py."""
    spec = importlib.util.spec_from_file_location("portuguese", EXAMPLES / "portuguese.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def subprocess_environment():
    """Return an environment in which a process imports this package.

    The working directory is not on its path.
    """
    paths = [
        str(Path(pytransformer.__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def write_mo(messages: dict[str, str], order: str = "<") -> bytes:
    """Return a catalogue like `msgfmt`: two tables of lengths and offsets, then the strings."""
    pairs = [(a.encode(), b.encode()) for a, b in sorted({**HEADER, **messages}.items())]
    place, tables, strings = 28 + 16 * len(pairs), [[], []], b""
    for side in (0, 1):
        for pair in pairs:
            tables[side] += [len(pair[side]), place + len(strings)]
            strings += pair[side] + b"\0"
    head = [0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 28 + 16 * len(pairs)]
    return struct.pack(f"{order}{7 + 4 * len(pairs)}I", *head, *tables[0], *tables[1]) + strings


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of these files with a record of them, like pip."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, files: dict[str, bytes], licence: str = "License-Expression: MIT") -> None:
        about = tmp_path / f"{name}-1.2.dist-info"
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(content)
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.2\n{licence}\n"
        )
        (about / "RECORD").write_text("".join(f"{name}/{path},,\n" for path in files))

    return put


@pytest.fixture
def mo():
    """Return `mo(messages)`: the bytes of a .mo file."""
    return write_mo


@pytest.fixture(scope="session")
def train_script():
    """Return the path of examples/train.py, for torchrun."""
    return str(EXAMPLES / "train.py")


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    """Use one thread: everything here is tiny."""
