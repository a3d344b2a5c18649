# SPDX-License-Identifier: Apache-2.0
"""Measured configurations by GPU, kernel and class of problems, and the tuning tool."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pytransformer.kernels import tuned
from pytransformer.kernels.attention import configs as attention_configs
from pytransformer.kernels.cross_entropy import configs as cross_entropy_configs
from pytransformer.kernels.feed_forward import configs as feed_forward_configs
from pytransformer.kernels.layer_norm import configs as layer_norm_configs

CONFIGS = {
    "attention": attention_configs,
    "cross_entropy": cross_entropy_configs,
    "feed_forward": feed_forward_configs,
    "layer_norm": layer_norm_configs,
}
SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "tools" / "tune.py"


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune"] = module  # dataclasses reads sys.modules
    spec.loader.exec_module(module)
    return module


def test_table_has_entries_per_gpu(tmp_path: Path) -> None:
    """Entries have no measurements; a missing file gives an empty table."""
    entry = {"BM": 64, "BN": 128, "warps": 8, "stages": 2}
    path = tuned.path_of("attention", "NVIDIA H200", tmp_path)
    assert path == tmp_path / "nvidia-h200" / "attention.json"
    path.parent.mkdir()
    key = attention_configs.key_of("forward", 72, 2, 0)
    assert key == "forward, 16 bit, head size 128"
    path.write_text(
        json.dumps(
            {"gpu": "NVIDIA H200", "kernels": {key: {**entry, "time_us": 3.0, "heuristic_us": 4.0}}}
        )
    )
    table = tuned.read("attention", "NVIDIA H200", tmp_path)
    assert table == {key: entry} and tuned.read("attention", "NVIDIA A100", tmp_path) == {}
    config = attention_configs.config
    assert config("forward", 90, 72, 2, score_mods=0, tuned=table) == attention_configs.Config(
        **entry
    )
    assert config("forward", 90, 64, 2, score_mods=0, tuned=table) == config(
        "forward", 90, 64, 2, score_mods=0
    )
    assert config("forward", 90, 72, 2, score_mods=1, tuned=table) == config(
        "forward", 90, 72, 2, score_mods=1
    )
    cpu = torch.device("cpu")
    assert tuned.table("attention", cpu) == {}
    with tuned.trying("attention", table):
        assert tuned.table("attention", cpu) == table and tuned.table("feed_forward", cpu) == {}
    assert tuned.table("attention", cpu) == {}


def test_committed_tables_are_configurations() -> None:
    for path in tuned.FOLDER.glob("*/*.json"):
        written = json.loads(path.read_text())
        configs = CONFIGS[path.stem]
        assert (
            tuned.path_of(path.stem, written["gpu"]) == path
            and {"torch", "triton", "commit"} <= written.keys()
        )
        for entry in tuned.read(path.stem, written["gpu"]).values():
            configs.Config(**entry)


def test_tasks_cover_every_kernel_once(tune: ModuleType) -> None:
    """Every kernel of every op has its classes, and starts from its heuristic configuration."""
    tasks = list(tune.tasks())
    keys = [(t.op, t.key) for t in tasks]
    assert len(set(keys)) == len(keys)
    kernels = {
        "attention": attention_configs.INTERPRETED,
        "cross_entropy": cross_entropy_configs.HEURISTIC,
        "feed_forward": feed_forward_configs.HEURISTIC,
        "layer_norm": ("forward", "backward"),
    }
    for op, names in kernels.items():
        for name in names:
            assert any(key == name or key.startswith(f"{name}, ") for o, key in keys if o == op), (
                op,
                name,
            )
    for task in tasks:
        assert len(set(task.candidates)) == len(task.candidates) > 1, task.key
        assert all(c.BN % 32 == 0 and c.BN & (c.BN - 1) == 0 for c in task.candidates)
        if task.key.startswith("dq"):
            assert all(c.BM <= c.BN for c in task.candidates)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would start tuning this GPU")
def test_missing_gpu_exits_with_an_error(
    tune: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_gpu_run_can_tune(tune: ModuleType, tmp_path: Path) -> None:
    """The tool accepts the commands of bench/gpu.sh and starts with the hottest kernel."""
    environment = {**os.environ, "DRY_RUN": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    script = SCRIPT.parents[1] / "gpu.sh"
    output = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    (words,) = (
        line.partition("tune.py ")[2].split() for line in output.splitlines() if "tune.py " in line
    )
    options = tune.parser().parse_args(words)
    assert tune.chosen_by(options)[0].key == "forward, 16 bit, head size 128"
    assert tmp_path in options.folder.parents and options.seconds < 120


def test_nearest_candidates_run_first(tune: ModuleType) -> None:
    table = feed_forward_configs.Config(64, 64, 32, 4, 2)
    far, near, library = (
        dataclasses.replace(table, **c) for c in ({"BM": 256}, {"stages": 3}, {"library": True})
    )
    assert tune.nearest_first([table, far, library, near]) == [table, near, library, far]


@pytest.mark.parametrize(
    "key",
    [
        "decode, 16 bit, head size 64",
        "hidden gated, 16 bit, up to 16 rows",
        "backward, 16 bit, up to 1024 columns",
        "backward, up to 1024 classes",
    ],
)
def test_dry_run_compiles_distinct_candidates(key: str) -> None:
    """Candidates reach their kernel: two of them use different registers or memory."""
    environment = {
        k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"
    }  # compiled, not interpreted
    command = [sys.executable, str(SCRIPT), "--dry-run", "--only", key, "--most", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = re.findall(r"Config\(.*\) (\{.*\})", done.stdout)
    assert len(taken) >= 2 and taken[0] != taken[1], done.stdout
