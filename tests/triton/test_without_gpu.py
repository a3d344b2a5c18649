# SPDX-License-Identifier: Apache-2.0
"""Triton's JIT and launcher with a stub of the driver in place of a GPU: see stub/gpu.py.

Each test starts a process that does not interpret, with or without TRITON_INTERPRET here.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytransformer import kernels as triton_kernels
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._backends.triton import availability

STUB = Path(__file__).with_name("stub")
ARCHITECTURES = (80, 86, 90, 120)
SHARED_OF_SM86 = (
    101376  # max bytes per block on compute capability 8.6 and 8.9, which use the tiles of 8.0
)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc").split()[0]) is None,
    reason="needs a C compiler for the stub driver",
)


def _run(script: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(STUB), environment.get("PYTHONPATH")))
    )
    command = [sys.executable, "-W", "ignore", str(STUB / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@needs_compiler
def test_launches_pass_every_argument() -> None:
    """Run every named case, random problems, and 0 and 1, which Triton specializes to constants.

    Sizes, strides and values take 0 and 1.
    """
    print(_run("launches.py", "--arch", "90", "--cases", "1", "--random", "8"))


@needs_compiler
def test_warm_calls_launch_the_same_as_cold_calls() -> None:
    """Launches stored by kernels/_launch.py repeat kernels, grids, numbers and memory."""
    print(_run("warm.py", "--arch", "90", "--cases", "2", "--random", "4"))


@needs_compiler
@pytest.mark.slow
def test_all_warm_calls() -> None:
    print(_run("warm.py", "--arch", "90", "--dtypes", "3", "--random", "100"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_launches(architecture: int) -> None:
    print(_run("launches.py", "--arch", str(architecture), "--dtypes", "3", "--random", "300"))


# Variants of a kernel that sizes select. attention_forward: decode, prefill, and when packed the
# sequences that each leaves to the other; contiguous and several runs of keys. A bias's rows begin
# at multiples of 16 elements, or not.
FORMS = {
    ("decode", "attention_forward"): 2,
    ("decode_pages", "attention_forward"): 2,
    ("append", "rotary_append"): 2,  # buffers, pages
    ("window", "attention_forward"): 2,
    ("train", "attention_forward"): 2,
    ("packed", "attention_forward"): 3,
    ("train_with_bias", "attention_forward"): 2,
    **{
        ("train_with_bias", f"attention_backward_{name}"): 2
        for name in ("preprocess", "dq", "dkdv", "dbias")
    },
}


@needs_compiler
def test_sizes_cause_no_recompilation() -> None:
    """Decode over 4,096 cache lengths and 256 page tables, append, and train on 512 lengths.

    Training uses five batch sizes; windows and global keys have 100 sizes.
    """
    runs = json.loads(_run("variants.py"))
    print(runs)
    assert {run: len(kernels) for run, kernels in runs.items()} == {
        "decode": 2, "decode_pages": 2, "append": 2, "window": 5, "train": 4, "train_with_bias": 5,
        "blocks": 4, "packed": 5, "rows": 8,
    }  # fmt: skip
    for run, kernels in runs.items():
        for name, (variants, _) in kernels.items():
            assert variants <= FORMS.get((run, name), 1), (
                f"{run}: {name} is compiled {variants} times"
            )


def test_tiles_of_sm80_fit_compute_capability_86() -> None:
    """8.6 and 8.9 compile the table's entries for sm_80, with 62 KB less shared memory."""
    table = json.loads((STUB.parent / "resources.json").read_text())["kernels"]
    ours = {key: used["shared"] for key, used in table.items() if key.startswith("sm_80 ")}
    assert any("segments D128 bf16 forward" in key for key in ours)
    over = [
        key
        for key, shared in ours.items()
        if shared > SHARED_OF_SM86 and not re.search(r"D256 fp32", key)
    ]
    assert not over, over


# ---- tests without a kernel


@pytest.fixture
def switches() -> Iterator[None]:
    old = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = old


def test_both_tf32_switches_are_supported(switches: None) -> None:
    from pytransformer.kernels._lang import precision

    torch.backends.cuda.matmul.allow_tf32 = True
    assert precision(torch.float32) == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = False
    assert precision(torch.float32) == "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):  # PyTorch forbids reading the old switch now
        _ = torch.backends.cuda.matmul.allow_tf32
    assert precision(torch.float32) == "tf32"
    assert precision(torch.bfloat16) == precision(torch.float16) == "ieee"


@pytest.mark.parametrize("op", ["attention", "feed_forward"])
def test_ops_run_with_the_new_tf32_switch(switches: None, op: str) -> None:
    import pytransformer as pt
    from support.hugging_face import distance, model_distance_limit

    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(1, 1, 4, 16, dtype=dtype)
        if op == "attention":
            found, expected = (pt.attention(x, x, x, backend=b) for b in ("triton", "reference"))
        else:
            w = torch.randn(16, 16, dtype=dtype)
            found, expected = (
                pt.feed_forward(x, w, None, w, None, backend=b) for b in ("triton", "reference")
            )
        assert found.dtype == dtype and distance(found, expected) < model_distance_limit(dtype)


def test_amd_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.delenv("PYTRANSFORMER_EMULATE", raising=False)
    device = torch.device("cuda", 0)
    for reason in (
        availability._unavailable(device, "x"),
        cuda_library.why_not("layer_norm_fwd", device),
    ):
        assert reason is not None and "ROCm 6.4" in reason


def may_be_none(annotation: object) -> bool:
    return type(None) in typing.get_args(annotation)


def test_kernel_tuples_are_none_only_in_their_elements() -> None:
    """Triton 3.6 cannot compare a tuple that contains None with None.

    Attention with a dense mask did not compile there, so only elements may be None.
    """
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}.")
    ]
    tuples = {
        c
        for m in modules
        for c in vars(m).values()
        if isinstance(c, type) and issubclass(c, tuple) and hasattr(c, "_fields")
    }
    hints = {c: typing.get_type_hints(c) for c in tuples}
    holds_none = {c for c, fields in hints.items() if any(map(may_be_none, fields.values()))}
    assert len(tuples) > 10 and holds_none
    wrong = {
        f"{c.__name__}.{name}"
        for c, fields in hints.items()
        for name, annotation in fields.items()
        if may_be_none(annotation) and holds_none & set(typing.get_args(annotation))
    }
    assert not wrong
