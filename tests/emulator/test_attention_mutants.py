"""Faults planted in the attention kernels' source, each of which must be caught by attention_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import attention_problems
import pytest
import torch
from planted_texts import Fault, check_caught, check_texts, parameters

TILE, SEQUENCE, TERMS = "tile/matrix_tile.cuh", "attention/sequence.cuh", "attention/terms.cuh"
FWD, BWD, QUERIES = "attention/fwd.cuh", "attention/bwd_tile.cuh", "attention/bwd_queries.cuh"
BITS, PARTS = "attention/key_bits.cuh", "attention/work.cuh"
KEYS, DENSE, PLAN = "attention/bwd_keys.cuh", "attention/bwd_dense.cuh", "attention/kernels.h"
WAIT, SYNC = "    ptx::cp_async_wait<0>();\n", "    ptx::syncthreads();  // "
LATE = "not ordered after the"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
HERE, THERE = "this tile is there, and nobody reads the one before any more\n", "K is there, and nobody reads V any more\n"

FAULTS = (
    # memory and order
    Fault("another swizzle for products with rows", TILE, "b.at(8 * n + lane % 8", "b.at(8 * n + (lane ^ 1) % 8", "plain 64"),
    Fault("no swizzle where tiles are written", TILE, "cp_async_16(tile.at(row, chunk)", "cp_async_16(tile.at(row, chunk ^ (row & 7))",
          "plain 64"),
    Fault("a chunk past the columns", TILE, "chunk * kPer < columns;", "chunk * kPer <= columns;", "plain 128"),
    Fault("a row past the last", TILE, "r >= lo && r < hi &&", "r >= lo && r <= hi &&", "plain 64"),
    Fault("no wait for keys", FWD, WAIT + SYNC + THERE, SYNC + THERE, "plain 64", slow=False),
    Fault("no barrier after keys have come", FWD, SYNC + THERE, "", "plain 64"),
    Fault("no barrier after values have come", FWD, SYNC + "V is there, and nobody reads K any more\n", "", "plain 64"),
    Fault("no barrier in the pass over queries", QUERIES, SYNC + HERE, "", "plain 64"),
    Fault("no barrier in the pass over keys", KEYS, SYNC + HERE, "", "plain 64"),
    Fault("the other stage", QUERIES, "(t - range.first) % kTile.stages", "(t - range.first + 1) / 2 % kTile.stages", "plain 64"),
    Fault("one stage only", KEYS, "streamed + n % kTile.stages * kStage", "streamed", "plain 64"),
    Fault("no barrier before diagonals are added", QUERIES, "      ptx::syncthreads();\n      diagonals.add", "      diagonals.add",
          "T5 of one direction, softcap"),
    Fault("tiles of a mask's gradient used again too early", DENSE, "if (t > first) ptx::syncthreads();",
          "", "hidden keys, segments", LATE),
    # bounds
    Fault("one key too many", SEQUENCE, "most(i + shift + 1, prefix)", "most(i + shift + 2, prefix)", "plain 64"),
    Fault("a window one too wide", SEQUENCE, "most(first_k, i + shift - p.left)", "most(first_k, i + shift - p.left - 1)", "plain 128"),
    Fault("queries of a key one off", SEQUENCE, "j - shift + p.left + 1", "j - shift + p.left", "plain 128"),
    Fault("a tile left out", SEQUENCE, "last = (end - origin + size - 1) / size;", "last = (end - origin) / size;", "plain 64"),
    Fault("a cut tile taken whole", SEQUENCE, "tile >= whole_end", "tile > whole_end", "plain 64"),
    Fault("prefix ignored by keys", SEQUENCE, "if (p.causal && j >= prefix)", "if (p.causal)", "wide heads, prefix"),
    # key padding
    Fault("padding's first key one too early", SEQUENCE, "first_k = int(head.w[0])", "first_k = int(head.w[0]) - 1", "padding"),
    Fault("padding's first key one too late", SEQUENCE, "first_k = int(head.w[0])", "first_k = int(head.w[0]) + 1", "padding"),
    Fault("padding's last key one too late", SEQUENCE, "least(num_k, int(head.w[1]))", "least(num_k, int(head.w[1]) + 1)", "padding"),
    Fault("padding's last key one too early", SEQUENCE, "least(num_k, int(head.w[1]))", "least(num_k, int(head.w[1]) - 1)", "padding"),
    Fault("bounds of the first sequence", SEQUENCE, "ld_global_v4(p.key_bits.data + b * p.key_bits.batch)",
          "ld_global_v4(p.key_bits.data)", "padding"),
    Fault("holes of the first sequence", SEQUENCE, "words(p.key_bits.data + b * p.key_bits.batch + K", "words(p.key_bits.data + K",
          "padding with holes"),
    Fault("another word of holes", SEQUENCE, "words + at / 32", "words + at / 64", "padding with holes", slow=False),
    Fault("another bit of holes", SEQUENCE, ">> at % 32", ">> at % 16", "padding with holes"),
    Fault("no holes", SEQUENCE, "holes = head.w[2] != 0", "holes = false", "padding with holes"),
    Fault("holes of the other row", TERMS, "* 5 << 4 * m", "* 3 << 4 * m", "padding with holes"),
    Fault("holes of other columns", TERMS, "word >> 8 * (m - n)", "word >> 4 * (m - n)", "padding with holes"),
    Fault("queries that see but holes kept", KEYS, "(p.looks_up() || s.holes), cut", "p.looks_up(), cut", "padding and window"),
    Fault("holes in a bias's gradient", DENSE, "if (s.holes) seen &=", "if (s.num_k < 0) seen &=", "padding, bias and dropout"),
    Fault("the last key that is no padding", BITS, "end = key + 1", "end = key", "padding"),
    Fault("padding found by one warp", BITS, "warp < kKeyBitsThreads / 32", "warp < 1", "padding of 1100 keys"),
    Fault("padding found by two lanes", BITS, "d < 32; d *= 2) take", "d < 2; d *= 2) take", "padding of 1100 keys"),
    Fault("holes not counted", BITS, "most(end - first, 0) - visible", "0", "padding with holes"),
    # terms
    Fault("ALiBi forgets its offset", TERMS, "- query(at, n, r) - s_.shift;", "- query(at, n, r);", "T5 of one direction, softcap"),
    Fault("softcap's derivative", TERMS, "slope[n][r] = 1.0f - t * t;", "slope[n][r] = 1.0f - t;", "T5 of one direction, softcap"),
    Fault("terms overflow", TERMS, "s[n][r] = sum < -kFloatMax ? -kFloatMax : sum;", "s[n][r] = sum;", "rows that see nothing, finfo.min"),
    Fault("dropout of another group", TERMS, "key % 8 / 2,", "key % 4,", "dropout and ALiBi"),
    Fault("dropout's halves exchanged between lanes", TERMS, "shfl_xor_u32(mine[half], 4)", "shfl_xor_u32(mine[half], 8)",
          "dropout and ALiBi"),
    Fault("what nobody sees is read", TERMS, "return columns;", "return kAllColumns;", "hidden keys, segments"),
    # sums
    Fault("the maximum of half a row", TILE, "return fmaxf(x, ptx::shfl_xor(x, 2));", "return x;", "plain 64"),
    Fault("no decay of the sums", FWD, "o[d][2 * half] *= decay,", "o[d][2 * half] *= 1.0f,", "plain 64"),
    Fault("dropped weights left out of the sum", FWD, "l[half] += weight;", "l[half] += p.drop_threshold ? 0.5f * weight : weight;",
          "dropout and ALiBi"),
    Fault("lse without its maximum's scale", FWD, "m[half] : m[half] * p.scale", "m[half] : m[half]", "plain 64"),
    Fault("delta forgotten", BWD, "w * (down - row.delta)", "w * down", "dropout and ALiBi"),
    Fault("half a row's products", QUERIES, "c += kVector * kRowLanes", "c += 2 * kVector * kRowLanes", "plain 128"),
    Fault("rows of two added up", QUERIES, "LaneTeam team(kRowLanes);\n  const", "LaneTeam team(2 * kRowLanes);\n  const", "plain 64"),
    Fault("a head of a group left out", KEYS, "steps = count * p.group;", "steps = count;", "plain 128"),
    Fault("far diagonals lost", QUERIES, "store_far(sums, p, far.a, far.b);", "store_far(sums, p, 0.0f, far.b);",
          "T5 of one direction, softcap"),
    Fault("tiles left out of a bias's gradient", PARTS, "shared ? Range{0, all[d]}", "shared ? Range{0, 1}", "wide heads, prefix"),
    Fault("float32 weights not passed around", TILE, "b.at(8 * n + 2 * (q ^ x) + e,", "b.at(8 * n + 2 * q + e,", "float32"),
)  # fmt: skip


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    dtype = next(p.dtype for p in attention_problems.problems() if p.name == fault.problem)
    direction = "fwd" if fault.file == FWD else "bwd" if "bwd" in fault.file else "?wd"
    only = "attention.cu" if fault.file == BITS or "kRowLanes" in fault.old else f"{direction}_{DTYPES[dtype]}.cu"
    check_caught(fault, "attention_problems", "attention", builder, tmp_path, only)
