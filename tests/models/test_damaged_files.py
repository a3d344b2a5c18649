# SPDX-License-Identifier: Apache-2.0
"""Damaged or foreign files load correctly or raise one clear error."""

from __future__ import annotations

import json
import os
import random
import shlex
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pytransformer.models import GPT, GPTConfig, _files
from pytransformer.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint

CONFIG = GPTConfig(vocab_size=23, d_model=16, num_layers=1, num_heads=2, max_length=8)
COUNT = 1000  # number of damages
HUGGING_FACE = dict(
    model_type="gpt2", vocab_size=31, n_positions=12, n_embd=16, n_layer=1, n_head=4,
    activation_function="gelu_new", embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1,
    layer_norm_epsilon=1e-5, architectures=["GPT2LMHeadModel"],
)  # fmt: skip


def damaged(data: bytes, header: int, rng: random.Random) -> bytes:
    """Return the file with one damage: a flipped byte, a gap, or another length."""
    kind, changed = rng.randrange(6), bytearray(data)
    place = rng.randrange(header if kind == 0 else len(data))
    if kind < 2:
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == 2:
        changed[place : place + 4096] = bytes(len(changed[place : place + 4096]))
    elif kind == 3:
        del changed[place:]
    elif kind == 4:
        changed += rng.randbytes(rng.randint(1, 50))
    else:
        lengths = (0, 1, 2**63, 2**32, header - 9, header - 7, 100_000_001, len(data))
        changed[:8] = struct.pack("<Q", rng.choice(lengths))
    return bytes(changed)


def sweep(file: Path, load: Callable[[], Any], right: Callable[[Any], bool]) -> None:
    """Load the file with each damage: the result is right, or a ValueError is raised."""
    good, rng = file.read_bytes(), random.Random(0)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for number in range(COUNT):
        file.write_bytes(damaged(good, header, rng))
        try:
            result = load()
        except ValueError as error:
            assert str(error), number
        else:
            assert right(result), f"damage {number} was not noticed"


def test_damaged_models_load_right_or_are_refused(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    model.save(tmp_path)
    state = model.state()

    def right(loaded: GPT) -> bool:
        same = all(torch.equal(t, state[name]) for name, t in loaded.state().items())
        return same and loaded.config == CONFIG

    sweep(tmp_path / "model.safetensors", lambda: GPT.load(tmp_path), right)


def test_damaged_checkpoints_load_right_or_are_refused(tmp_path: Path) -> None:
    file, facts = tmp_path / "checkpoint-0000001.safetensors", {"place": [1, 2, 3]}
    tensors = {"model.w": torch.randn(30, 40), "optimizer.0.step": torch.tensor(3.0)}
    write_checkpoint(file, Checkpoint(tensors, facts))

    def right(loaded: Checkpoint) -> bool:
        return loaded.facts == facts and all(
            torch.equal(t, tensors[name]) for name, t in loaded.tensors.items()
        )

    sweep(file, lambda: read_checkpoint(file), right)


def test_damaged_tokenizers_load_or_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the tokenizer's library is optional")
    from pytransformer.training import Tokenizer

    file, rng = tmp_path / "tokenizer.json", random.Random(0)
    Tokenizer.train(["a b c d e f g h"] * 4, 40).save(file)
    good = file.read_bytes()
    for _ in range(COUNT):
        changed, place = bytearray(good), rng.randrange(len(good))
        kind = rng.randrange(3)
        if kind == 0:
            changed[place] = rng.randrange(256)
        elif kind == 1:
            del changed[place:]
        else:
            del changed[place : place + rng.randint(1, 30)]
        file.write_bytes(changed)
        try:
            assert len(Tokenizer.load(file)) > 0
        except ValueError as error:
            assert str(error)


ABOUT = {"model": "GPT", "config": dict(vocab_size=23, d_model=16, num_layers=1, num_heads=2)}
WRONG_HEADERS = {
    "no JSON": "{",
    "a list": "[]",
    "null": "null",
    "too deep": "[" * 100_000 + "]" * 100_000,
    "no config": json.dumps({"model": "GPT"}),
    "config is a list": json.dumps({"model": "GPT", "config": []}),
} | {
    f"{name} {value}": json.dumps({**ABOUT, "config": {**ABOUT["config"], name: value}})
    for name, value in [
        *(("num_layers", value) for value in ("1", 1.5, -1, True, None, 8000, 10**9)),
        *(("vocab_size", value) for value in (2**40, float("nan"), 2**20)),
        *(("num_heads", value) for value in (0, [2])),
        *(("dropout", value) for value in (7, "x", float("inf"))),
        ("activation", "__import__"),
        ("positions", {"a": 1}),
        ("d_model", 2**14),
        ("max_length", 2**62),
        ("eps", "nan"),
        ("poem", 1),
    ]
}


@pytest.mark.parametrize("text", WRONG_HEADERS.values(), ids=WRONG_HEADERS.keys())
def test_bad_configs_are_refused_before_the_model_is_built(text: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors", {"pytransformer": text})
    start = time.process_time()
    with pytest.raises(ValueError, match=r"\w"):
        GPT.load(tmp_path)
    assert time.process_time() - start < 2


WITHOUT_MEMORY = """
import sys
from pytransformer import models
for name in models.__all__:
    model = getattr(models, name)
    for config in getattr(model, "PRESETS", {}).values():
        model._without_memory(config, "a file")
        assert "torch._dynamo" not in sys.modules, name
        print(name)
"""


def test_headers_of_any_length_are_not_pickles(tmp_path: Path) -> None:
    """A pickle's first byte is the first byte of every 32nd header length."""
    GPT(GPTConfig(**ABOUT["config"])).save(tmp_path)
    tensors, metadata = _files.tensors(tmp_path / "model.safetensors")
    first_bytes = set()
    for size in range(0, 260, 8):
        _files.write_tensors(
            tmp_path / "model.safetensors", tensors, {**metadata, "size": "x" * size}
        )
        first_bytes.add((tmp_path / "model.safetensors").read_bytes()[0])
        GPT.load(tmp_path)
    assert 0x80 in first_bytes


def test_config_checks_do_not_import_the_compiler() -> None:
    """Some operations on the meta device import torch._dynamo, which takes two seconds."""
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    checked = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(set(checked)) >= 8


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in HUGGING_FACE for value in (None, "x", -4, [], {"a": 1})]
    + [("n_layer", 10**7), ("n_positions", 2**62), ("vocab_size", 2**20), ("n_head", 0)],
)
def test_bad_hugging_face_configs_raise_one_error(name: str, value: Any, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**HUGGING_FACE, name: value}))
    with pytest.raises(ValueError, match=r"\w"):
        GPT.load_hf(tmp_path)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_configs_without_a_field_raise_one_error(name: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    short = {key: value for key, value in HUGGING_FACE.items() if key != name}
    (tmp_path / "config.json").write_text(json.dumps(short))
    with pytest.raises(ValueError, match=r"\w"):
        GPT.load_hf(tmp_path)


@pytest.mark.parametrize(
    "index", ["..", ".", "", "a/b", "../x", "/etc/passwd", "a\\b", "\0", 5, None]
)
def test_index_paths_stay_in_the_folder(index: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"secret": torch.ones(1)}, tmp_path / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / _files.INDEX).write_text(json.dumps({"weight_map": {"x": index}}))
    with pytest.raises(ValueError, match=r"weight_map must be|outside its folder"):
        _files.read_hugging_face(folder)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": []}', "{}", "\xff"])
def test_bad_indices_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / _files.INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=_files.INDEX):
        _files.read_hugging_face(tmp_path)


@pytest.mark.parametrize(
    "name", ["$(touch pwned).bin", "'; touch pwned; '.bin", '"`touch pwned`".bin']
)
def test_command_in_the_pickle_message_runs_no_code_of_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    torch.save({"w": torch.arange(3.0)}, file)
    with pytest.raises(ValueError, match="is a pickle") as refusal:
        _files.refuse_pickle(file)
    command = str(refusal.value).splitlines()[1].strip()
    words = command.replace("python", "echo", 1)
    subprocess.run(words, shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert [f.name for f in tmp_path.iterdir()] == [name]
    exec(shlex.split(command)[2])
    assert torch.equal(_files.tensors(tmp_path / "model.safetensors")[0]["w"], torch.arange(3.0))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_saved_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        GPT(CONFIG).save(tmp_path)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}


@pytest.mark.parametrize("size", [2**63, _files.MAX_HEADER + 1])
def test_headers_over_the_limit_are_not_read(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as sparse:
        sparse.write(struct.pack("<Q", size))
        sparse.truncate(1 << 30)
    with pytest.raises(ValueError, match="over the limit"):
        GPT.load(tmp_path)
