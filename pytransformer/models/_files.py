# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: one safetensors file that also holds the config. No pickle is ever read."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'reading and writing weights needs safetensors: pip install "pytransformer-kernels[models]"'
        ) from error
    return safetensors


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place once written and synced: a reader sees the old file or the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(folder: str | os.PathLike[str], state: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """``folder/model.safetensors`` with ``about`` in its header, so that weights and config cannot part, and a readable
    ``config.json``. Each file is replaced as a whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about, indent=2, sort_keys=True)
    with replacing(folder / WEIGHTS) as temporary:
        tensors = {name: t.detach().contiguous() for name, t in state.items()}
        _safetensors().torch.save_file(tensors, temporary, metadata={"format": "pt", "pytransformer": text})
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(text + "\n")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the ``about`` of what :func:`write` wrote; ``path`` is its folder or file."""
    path = weights_file(Path(path))
    state, metadata = tensors(path)
    if "pytransformer" not in metadata:
        raise ValueError(
            f"{path} was not written by pytransformer: its header holds no config. For Hugging Face's use load_hf"
        )
    return state, json.loads(metadata["pytransformer"])


def weights_file(path: Path) -> Path:
    """The one safetensors file that ``path`` is or holds.

    Raises:
        FileNotFoundError: there is none.
        ValueError: only a pickle is there; the message says how to convert it.
    """
    refuse_pickle(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not (path / WEIGHTS).is_file():
        for file in sorted(path.iterdir()):
            refuse_pickle(file)
        raise FileNotFoundError(f"{path} holds no {WEIGHTS}")
    refuse_pickle(path / WEIGHTS)
    return path / WEIGHTS


def refuse_pickle(path: Path) -> None:
    """ValueError if ``path`` is named or begins like a pickle, which could run any code when read."""
    magic = b""
    if path.is_file():
        with open(path, "rb") as file:
            magic = file.read(4)
    if path.suffix not in PICKLES and magic != b"PK\x03\x04" and magic[:1] != b"\x80":
        return
    new = path.with_name(WEIGHTS)
    raise ValueError(
        f"{path} is a pickle, which can run any code when read; only safetensors are. If you trust where it is from, convert it:\n"
        '    python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone().contiguous() for k, v in '
        f"torch.load('{path}', map_location='cpu', weights_only=True).items()}}, '{new}')\""
    )


def tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of a safetensors file and the metadata of its header."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or an incomplete one: {error}") from error


def read_hugging_face(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors, of one file or many, and the config of a folder written by Hugging Face's ``save_pretrained``."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        refuse_pickle(folder)
        raise FileNotFoundError(f"{folder} holds no {CONFIG}; load_hf wants the folder of a Hugging Face model")
    config = json.loads((folder / CONFIG).read_text())
    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in files):
            raise ValueError(f"{folder / INDEX} names files outside its folder: {files}")
        return {k: v for name in files for k, v in tensors(weights_file(folder / name))[0].items()}, config
    return tensors(weights_file(folder))[0], config
