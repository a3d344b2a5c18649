"""Attention forward for Hopper in Gluon, beside the plain Triton kernel: an experiment to be measured, not a backend.

    python bench/gluon/attention_sm90.py                    # on an H100 or H200: check, time, print
    python bench/gluon/attention_sm90.py --out gluon.json

softmax(scale query @ keyᵀ) @ value without masks, bfloat16, (B, H, L, D) contiguous, D 64 or 128, L a multiple of 128. A warp
brings tiles of keys and values by TMA; two groups of four warps multiply, 64 queries each. A group issues the product of the next
tile of keys before that of the weights it has, so that its softmax runs beside a product: wait for 1 of 2, then for the other. No
query, key or value passes through registers, weights do not leave them.

With Triton 3.6 and 3.7; 3.9 has renamed what it uses. Compiles for sm_90a without spills (tests/triton/resources.json, "gluon").
Not yet run on a GPU: whether it stays is open.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import pytransformer as pt
from pytransformer.kernels import _lang
from pytransformer.testing import bounds

BM, BN = 64, 128  # queries of one group of warps, keys of a tile
STAGES = {64: 3, 128: 2}  # tiles of keys and of values in shared memory, by head size
REGISTERS = 168  # of a thread before the producer gives its own to the others
ROUNDS = 20


@gluon.jit
def producer(queries, keys, values, s_q, s_k, s_v, q_full, k_full, k_empty, v_full, v_empty, row_q, row_k, tiles):
    """One warp: each tile of keys and of values goes to the next of its buffers once both groups have left that."""
    STAGES: gl.constexpr = s_k.type.shape[0]
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), queries.block_type.nbytes)
        tma.async_copy_global_to_shared(
            queries, [row_q + group * queries.block_type.shape[0], 0], q_full.index(group), s_q.index(group)
        )
    for t in range(tiles):
        stage = t % STAGES
        left = (t // STAGES) & 1 ^ 1  # the parity that says so; true at once the first time round
        row = row_k + t * keys.block_type.shape[0]
        mbarrier.wait(k_empty.index(stage), left)
        mbarrier.expect(k_full.index(stage), keys.block_type.nbytes)
        tma.async_copy_global_to_shared(keys, [row, 0], k_full.index(stage), s_k.index(stage))
        mbarrier.wait(v_empty.index(stage), left)
        mbarrier.expect(v_full.index(stage), values.block_type.nbytes)
        tma.async_copy_global_to_shared(values, [row, 0], v_full.index(stage), s_v.index(stage))


@gluon.jit
def softmax_step(b_s, b_m, b_l, scale):
    """Weights of one tile of scores, the rows' new maximum and sum, and the factor of what was summed before."""
    top = gl.maximum(b_m, gl.max(b_s, 1) * scale)
    decay = gl.exp2(b_m - top)
    b_p = gl.exp2(b_s * scale - top[:, None])
    return b_p, top, b_l * decay + gl.sum(b_p, 1), decay


@gluon.jit
def consumer(outputs, s_q, s_k, s_v, q_full, k_full, k_empty, v_full, v_empty, row_q, tiles, scale, GROUP: gl.constexpr):
    """Four warps: 64 queries. scale is positive and has the factor log2 e."""
    STAGES: gl.constexpr = s_k.type.shape[0]
    BM: gl.constexpr = s_q.type.shape[1]
    BN: gl.constexpr = s_k.type.shape[1]
    D: gl.constexpr = s_k.type.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    b_m = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    b_l = gl.full([BM], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    b_o = gl.zeros([BM, D], gl.float32, SUMS)
    nothing = gl.zeros([BM, BN], gl.float32, SCORES)
    mbarrier.wait(q_full.index(GROUP), 0)
    q = s_q.index(GROUP)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q, s_k.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0), count=1)
    b_p, b_m, b_l, _ = softmax_step(b_s, b_m, b_l, scale)
    weights = gl.convert_layout(b_p.to(gl.bfloat16), WEIGHTS)
    for t in range(1, tiles):
        stage = t % STAGES
        before = (t - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (t // STAGES) & 1)
        scores = warpgroup_mma(q, s_k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((t - 1) // STAGES) & 1)
        product = warpgroup_mma(weights, s_v.index(before), b_o, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        b_p, b_m, b_l, decay = softmax_step(b_s, b_m, b_l, scale)
        b_o = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(v_empty.index(before), count=1)
        b_o = b_o * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(b_p.to(gl.bfloat16), WEIGHTS)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    b_o = warpgroup_mma(weights, s_v.index(last), b_o, is_async=False)
    b_o = b_o / gl.convert_layout(b_l, gl.SliceLayout(1, SUMS))[:, None]
    q.store(b_o.to(gl.bfloat16))  # this group's queries are needed no more
    fence_async_shared()
    tma.async_copy_shared_to_global(outputs, [row_q + GROUP * BM, 0], q)
    tma.store_wait(0)


@gluon.jit
def gluon_forward(queries, keys, values, outputs, length, scale, STAGES: gl.constexpr):
    """128 queries of one head. The descriptors see (B H L, D)."""
    BM: gl.constexpr = queries.block_type.shape[0]
    BN: gl.constexpr = keys.block_type.shape[0]
    D: gl.constexpr = keys.block_type.shape[1]
    s_q = gl.allocate_shared_memory(gl.bfloat16, [2, BM, D], queries.layout)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], keys.layout)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], values.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(q_full.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    row_q = gl.program_id(0) * 2 * BM
    row_k = row_q // length * length
    tiles = length // BN
    # Registers of a thread: 240 for the groups that multiply, 24 for the warp that loads.
    gl.warp_specialize(
        [
            (consumer, (outputs, s_q, s_k, s_v, q_full, k_full, k_empty, v_full, v_empty, row_q, tiles, scale, 0)),
            (consumer, (outputs, s_q, s_k, s_v, q_full, k_full, k_empty, v_full, v_empty, row_q, tiles, scale, 1)),
            (producer, (queries, keys, values, s_q, s_k, s_v, q_full, k_full, k_empty, v_full, v_empty, row_q, row_k, tiles)),
        ],
        [4, 1],
        [240, 24],
    )


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) bfloat16 each, contiguous."""
    head_dim, length = query.shape[-1], query.shape[-2]
    if query.dtype != torch.bfloat16 or head_dim not in STAGES or length % (2 * BM) or length % BN:
        raise ValueError(
            f"gluon: bfloat16, head size 64 or 128 and a multiple of 128 positions are wanted, got {query.dtype}, {head_dim} and {length}"
        )
    if not query.shape == key.shape == value.shape or not all(t.is_contiguous() for t in (query, key, value)):
        raise ValueError("gluon: query, key and value must be contiguous and of one shape")
    out = torch.empty_like(query)
    descriptors = (_rows(t, block) for t, block in ((query, BM), (key, BN), (value, BN), (out, BM)))
    _lang.launch(
        gluon_forward, query.numel() // head_dim // (2 * BM), query.device, *descriptors, length, math.log2(math.e) / head_dim**0.5,
        STAGES[head_dim], warps=4, stages=1, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def _rows(t: torch.Tensor, block: int) -> TensorDescriptor:
    rows = t.view(-1, t.shape[-1])
    shape = [block, t.shape[-1]]
    return TensorDescriptor.from_tensor(rows, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16))


def measure(batch: int, heads: int, length: int, head_dim: int) -> dict[str, Any]:
    """Error against the reference and TFLOP/s of this kernel and of the plain one, timed by turns."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
    plain = functools.partial(pt.attention, q, k, v, backend="triton", strict=True)
    calls = {"gluon": functools.partial(attention, q, k, v), "triton": plain}
    few = (q[:1, :1].contiguous(), k[:1, :1].contiguous(), v[:1, :1].contiguous())
    exact = pt.attention(*few, backend="reference")
    errors = {"gluon": bounds.relative_error(attention(*few), exact)}
    errors["triton"] = bounds.relative_error(pt.attention(*few, backend="triton"), exact)
    found: dict[str, Any] = {"shape": [batch, heads, length, head_dim], "error": errors}
    if not errors["gluon"] <= 1.5 * errors["triton"]:
        return found | {"wrong": True}  # and not timed
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 3):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    flops = 4 * batch * heads * length * length * head_dim
    return found | {"tflops": {n: round(flops / statistics.median(t[3:]) / 1e9, 1) for n, t in times.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("gluon: needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    results = []
    for head_dim in STAGES:
        for length in (2048, 8192):
            results.append(measure(16384 // length, 2048 // head_dim, length, head_dim))
            print(results[-1], flush=True)
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1) + "\n")
    return int(any(r.get("wrong") for r in results))


if __name__ == "__main__":
    sys.exit(main())
