# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: one safetensors file that also contains the config. It never reads pickles."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shlex
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DIGEST = "sha256"  # the header's key, and the hash's name
MAX_HEADER = 32 << 20  # bytes; the largest models' headers are about one megabyte
MAX_JSON = 32 << 20


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "reading and writing weights needs safetensors: pip install"
            ' "pytransformer-kernels[models]"'
        ) from error
    return safetensors


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` once it is written and synced.

    A reader sees the old file or the new one, even after a power failure. The file gets the
    permissions of any new file, whatever its writer sets.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        yield temporary
        with open(temporary, "rb") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace the file by one with this text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Replace a safetensors file; its header has ``metadata`` and a digest of tensors and metadata.

    Raises:
        OSError: the file system refused, for example because the disk is full.
    """
    safetensors = _safetensors()
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    header = {**metadata, DIGEST: digest(tensors, metadata)}
    with replacing(path) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary, metadata=header)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Return the digest of the tensors (names, dtypes, shapes, data) and of the metadata."""
    state = hashlib.new(DIGEST)
    for key, value in sorted(metadata.items()):
        state.update(json.dumps([key, value]).encode() if key != DIGEST else b"")
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            state.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return state.hexdigest()


def write(
    folder: str | os.PathLike[str], state: dict[str, torch.Tensor], about: dict[str, Any]
) -> None:
    """Write ``folder/model.safetensors`` with ``about`` in its header, and ``config.json``.

    The header binds the config to the weights; ``config.json`` is for readers. Each file is
    replaced atomically.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about, indent=2, sort_keys=True)
    write_tensors(folder / WEIGHTS, state, {"format": "pt", "pytransformer": text})
    write_text(folder / CONFIG, text + "\n")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and ``about`` of :func:`write`; ``path`` is its folder or file."""
    path = weights_file(Path(path))
    state, metadata = tensors(path)
    if "pytransformer" not in metadata:
        raise ValueError(
            f"{path} was not written by pytransformer: its header holds no config. For Hugging"
            " Face's use load_hf"
        )
    about = parse(metadata["pytransformer"], f"the config in the header of {path}")
    if not isinstance(about.get("config"), dict):
        raise ValueError(f"the config in the header of {path} must have an object 'config'")
    return state, about


def parse(text: str, source: str) -> dict[str, Any]:
    """Return the JSON object of an untrusted text.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} must be a JSON object, got {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of an untrusted file.

    Raises:
        ValueError: the file is not a JSON object, not UTF-8, or too large.
    """
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path} must be at most {MAX_JSON} bytes, got {path.stat().st_size}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    return parse(text, str(path))


def weights_file(path: Path) -> Path:
    """Return the safetensors file at ``path`` or in the folder ``path``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there is only a pickle; the message has the command to convert it.
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
    """Raise ValueError for a pickle, by name or magic bytes; reading it can run any code."""
    start = b""
    if path.is_file():
        with open(path, "rb") as file:
            start = file.read(9)
    # A safetensors file starts with its header's length in 8 bytes; the first may equal a pickle's.
    pickled = start.startswith(b"PK\x03\x04") or (start.startswith(b"\x80") and start[8:] != b"{")
    if path.suffix not in PICKLES and not pickled:
        return
    code = (
        "import torch, safetensors.torch as s; s.save_file({k: v.clone().contiguous() for k, v in "
        f"torch.load({str(path)!r}, map_location='cpu', weights_only=True).items()}}, "
        f"{str(path.with_name(WEIGHTS))!r})"
    )
    raise ValueError(
        f"{path} is a pickle, which can run any code when read; only safetensors are. If you trust"
        f" where it is from, convert it:\n    {shlex.join(['python', '-c', code])}"
    )


def tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return all tensors of a safetensors file and the metadata of its header.

    Raises:
        ValueError: the file is damaged, by its header, its size or its digest (if any).
    """
    safetensors = _safetensors()
    with open(path, "rb") as binary:
        size = int.from_bytes(binary.read(8), "little")
    if size > MAX_HEADER:
        raise ValueError(
            f"{path} is not a safetensors file: its header of {size} bytes is over the limit of"
            f" {MAX_HEADER}"
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (safetensors.SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a safetensors file, or an incomplete one: {error}"
        ) from error
    if DIGEST in metadata and metadata[DIGEST] != digest(state, metadata):
        raise ValueError(
            f"{path} is damaged: its tensors or its header are not what was written; use another"
            " copy"
        )
    return state, metadata


def read_hugging_face(
    path: str | os.PathLike[str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and config of a folder written by Hugging Face's ``save_pretrained``.

    The tensors are in one file or in shards.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        refuse_pickle(folder)
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG}; load_hf needs the folder of a Hugging Face model"
        )
    config = read_json(folder / CONFIG)
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(name, str) for name in places.values()
        ):
            raise ValueError(
                f"{folder / INDEX}: weight_map must be an object of file names, got {places!r:.80}"
            )
        files = sorted(set(places.values()))
        if outside := [name for name in files if not _is_file_name(name)]:
            raise ValueError(f"{folder / INDEX} names files outside its folder: {outside[:8]}")
        return {k: v for name in files for k, v in tensors(_shard(folder, name))[0].items()}, config
    return tensors(weights_file(folder))[0], config


def _is_file_name(name: str) -> bool:
    """Return whether the name stays in its folder; links may point outside (caches)."""
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _shard(folder: Path, name: str) -> Path:
    refuse_pickle(folder / name)
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder / INDEX} names {name}, which is not in its folder")
    return folder / name
