# SPDX-License-Identifier: Apache-2.0
"""``pt.explain`` predicts the scratch memory of the kernels, because both read one plan.

With one thread the figure is exact, to the byte of the arenas' huge pages. Kernels keep their
arenas, so each case runs in a process that is forked before any kernel runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import native

WHY_NOT = native.why_not("attention_scratch")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ISAS = torch.ops.pytransformer_C.cpu_isas() if WHY_NOT is None else []

SCRIPT = """
import json, os, sys, torch
import pytransformer as pt
torch.set_num_threads(1)


def leaves(dtype, *shapes):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def layer_norm(dtype, rows, columns):
    x, w, b = leaves(dtype, (rows, columns), (columns,), (columns,))
    return "layer_norm", (x, (columns,), w, b), {}, 0


def add_norm(dtype, rows, columns):
    x, r, w = leaves(dtype, (rows, columns), (rows, columns), (columns,))
    return "add_norm", (x, r, w), dict(dropout_p=0.5, dropout_seed=1), 0


def feed_forward(dtype, rows, width, hidden, gated):
    x, w1, w2, gate = leaves(
        dtype, (rows, width), (hidden, width), (width, hidden), (hidden, width)
    )
    tensors = (3 if gated else 2) * rows * hidden * dtype.itemsize
    terms = dict(gate_weight=gate if gated else None, dropout_p=0.1, dropout_seed=1)
    return "feed_forward", (x, w1, None, w2, None), terms, tensors


def linear_cross_entropy(dtype, rows, width, classes, bias):
    x, w, b = leaves(dtype, (rows, width), (classes, width), (classes,))
    terms = dict(bias=b if bias else None)
    return "linear_cross_entropy", (x, w, torch.arange(rows) % classes), terms, 4 * rows


def attention(dtype, batch, heads, queries, keys, width, kind=""):
    kv_shape = (batch, 2, keys, width)
    q, k, v = leaves(dtype, (batch, heads, queries, width), kv_shape, kv_shape)
    mask = torch.rand(batch, 1, queries, keys) < 0.5
    bias, = leaves(torch.float32, (1, heads, queries, keys))
    terms = {
        "": {},
        "mask": dict(attn_mask=mask),
        "bias": dict(bias=bias),
        "dropout": dict(dropout_p=0.1, dropout_seed=1),
        "causal": dict(causal="top_left"),
        "lengths": dict(key_lengths=torch.full((batch,), keys - 3)),
    }
    if queries == keys:
        terms["blocks"] = dict(attn_mask=pt.BlockMask.longformer(queries, window=32))
    return "attention", (q, k, v), terms[kind], bias.numel() * 4 if kind == "bias" else 0


def measure(case, directions):
    name, dtype, *sizes = case
    op, tensors, keywords, apart = globals()[name](getattr(torch, dtype), *sizes)
    if directions == "forward":
        detach = lambda t: t.detach() if isinstance(t, torch.Tensor) else t
        tensors = [detach(t) for t in tensors]
        keywords = {n: detach(t) for n, t in keywords.items()}
        apart = 0
    planned = pt.explain(op, *tensors, **keywords).extra_bytes["cpu"] - apart
    out = getattr(pt, op)(*tensors, backend="cpu", strict=True, **keywords)
    if directions == "both":
        out = out[0] + out[1] if isinstance(out, tuple) else out
        out.float().sum().backward()
    return planned, torch.ops.pytransformer_C.cpu_scratch_bytes()


for line in sys.stdin:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, json.dumps(measure(*json.loads(line))).encode())
        os._exit(0)
    os.close(write)
    print(os.read(read, 1000).decode() or "[]", flush=True)
    os.waitpid(child, 0)
"""

CASES = [
    ("layer_norm", "float32", 3000, 700),
    ("layer_norm", "float64", 20, 100_000),
    ("add_norm", "bfloat16", 500, 4096),
    ("feed_forward", "float32", 300, 256, 1024, False),
    ("feed_forward", "bfloat16", 2000, 128, 5000, True),
    ("feed_forward", "float32", 7, 512, 3000, False),
    ("feed_forward", "float32", 3000, 64, 700, True),
    ("linear_cross_entropy", "float32", 700, 256, 5000, True),
    ("linear_cross_entropy", "bfloat16", 5000, 512, 3000, False),
    ("linear_cross_entropy", "float32", 40, 2500, 300, True),
    ("attention", "float32", 2, 4, 300, 300, 64),
    ("attention", "bfloat16", 1, 8, 1500, 1500, 64, "causal"),
    ("attention", "float32", 2, 4, 1, 5000, 128),
    ("attention", "float32", 2, 2, 700, 700, 32, "mask"),
    ("attention", "float32", 1, 4, 200, 900, 64, "bias"),
    ("attention", "bfloat16", 3, 4, 130, 130, 80, "dropout"),
    ("attention", "float32", 2, 4, 256, 256, 64, "blocks"),
    ("attention", "float32", 40, 2, 50, 600, 64, "lengths"),
]
FORWARD = [case for case in CASES if case[0] == "attention"]


@pytest.mark.parametrize("isa", ISAS)
def test_explain_predicts_the_scratch_of_kernels(isa: str) -> None:
    asked = [(case, "both") for case in CASES] + [(case, "forward") for case in FORWARD]
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTRANSFORMER_CPU_ISA": isa,
        "OMP_NUM_THREADS": "1",
    }
    lines = "".join(json.dumps(case) + "\n" for case in asked)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=lines,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(asked), done.stderr
    wrong = [
        (case, held) for case, held in zip(asked, found) if len(held) != 2 or held[0] != held[1]
    ]
    assert not wrong, f"planned, held: {wrong}\n{done.stderr}"


def test_explain_raises_the_length_error_of_the_call() -> None:
    q, lengths = torch.randn(2, 2, 9, 16), torch.tensor([3, 99])
    with pytest.raises(ValueError, match="key_lengths must be between 0 and 9, got 99") as called:
        pt.attention(q, q, q, key_lengths=lengths)
    with pytest.raises(
        ValueError, match="key_lengths must be between 0 and 9, got 99"
    ) as explained:
        pt.explain("attention", q, q, q, key_lengths=lengths)
    assert str(explained.value) == str(called.value)


def test_threads_have_separate_arenas() -> None:
    x, before = torch.randn(4000, 512), torch.get_num_threads()
    scratch = torch.ops.pytransformer_C.layer_norm_scratch
    try:
        torch.set_num_threads(1)
        one = scratch(x, 512)
        torch.set_num_threads(2)
        assert scratch(x, 512) == one + (2 << 20)  # a row fits one huge page
    finally:
        torch.set_num_threads(before)
