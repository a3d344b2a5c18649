# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one safetensors file each, written atomically.

Tensors belong to the model and the optimizer; the file's header holds the rest as JSON. Reading a
file executes nothing from it. A file is written under another name, flushed to disk and then
renamed, which is atomic. An interrupted write leaves earlier checkpoints intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._file_lock import try_lock
from ..extras import require
from ..models import _files

_NAME = re.compile(r"checkpoint-(\d+)\.safetensors")
_HEADER = "training"
_held: set[Path] = set()  # folders that this process has locked


class Checkpoint(NamedTuple):
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]  # JSON values


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file atomically; tensors that share memory (tied weights) appear once per name."""
    require("safetensors.torch", "models", "writing a checkpoint")
    tensors, seen = {}, set()
    for name, tensor in checkpoint.tensors.items():
        tensor = tensor.detach().contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    _files.write_tensors(path, tensors, {_HEADER: json.dumps(checkpoint.facts)})


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the output of `write_checkpoint` onto the CPU.

    Raises:
        ValueError: the file is damaged or not a checkpoint.
    """
    tensors, header = _files.tensors(path)
    if _HEADER not in header:
        raise ValueError(
            f"{path} is not a checkpoint of a training run: its header has no entry {_HEADER!r}"
        )
    return Checkpoint(tensors, _files.parse(header[_HEADER], f"the header of {path}"))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step:07}.safetensors"


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first."""
    found = {
        path: match for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
    }
    return sorted(found, key=lambda path: int(found[path][1]))


def newest_whole(folder: Path) -> tuple[Path, Checkpoint, list[str]] | None:
    """Return the newest readable checkpoint and the faults of newer ones, or None.

    None means that the folder holds no checkpoint.

    Raises:
        ValueError: all are damaged.
    """
    wrong: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, read_checkpoint(path), wrong
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(f"{folder} has no readable checkpoint: {'; '.join(wrong)}")
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other runs; the lock ends with the process, even after a crash.

    Raises:
        ValueError: another run holds the lock.
    """
    folder = folder.resolve()
    if folder in _held:  # the command's lock, around the trainer's
        yield
        return
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(handle):
            raise ValueError(
                f"another run writes into {folder}: wait for it, or name another folder"
            )
        _held.add(folder)
        yield
    finally:
        _held.discard(folder)
        os.close(handle)
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was written


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and the files of interrupted writes."""
    for path in [*checkpoints(folder)[:-keep], *folder.glob(".checkpoint-*")]:
        path.unlink(missing_ok=True)


def pack_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's state_dict as tensors named "<parameter>.<entry>", and the rest."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{index}.{name}"] = value
    return tensors, {"numbers": numbers, "groups": state["param_groups"]}


def unpack_optimizer(tensors: Mapping[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Reverse `pack_optimizer`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *rest["numbers"].items()]:
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = value
    groups = [
        {k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in rest["groups"]
    ]
    return {"state": state, "param_groups": groups}
