"""Faults planted in the attention kernels for sm_90a, each of which must be caught by sm90_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted import Fault, check_caught, check_texts, parameters

RING, WARPGROUP, TILE, FWD = "tile/ring.cuh", "tile/warpgroup.cuh", "attention/sm90_tile.cuh", "attention/sm90_fwd.cuh"
QUERIES, KEYS, QUAD = "attention/sm90_bwd_queries.cuh", "attention/sm90_bwd_keys.cuh", "tile/quad.cuh"
GRADIENTS, SUMS, FUSED = "attention/sm90_bwd_tile.cuh", "attention/sm90_bwd_sums.cuh", "attention/sm90_bwd_fused.cuh"
LOOKUPS, REDO = "attention/sm90_lookups.cuh", "attention/redo.cuh"
OUTSIDE = "lies outside global memory"
LATE, TOUCHED, UNAWAITED = "not ordered after", "was touched while a wgmma was in flight", "announced by mbarrier"
DEADLOCK = "deadlock"
WAIT, WAIT_ALL = "          ptx::wgmma_wait<1>();\n", "          ptx::wgmma_wait<0>();\n"
RELEASE = "          release_products(v, visit);\n"
ANNOUNCE, RELEASES = "        if (lane_id() == 0) q.announce", "        if (lane_id() == 0) q.release"


FAULTS = (
    # rings: who waits for what, and where things lie
    Fault("phase of empty flipped", RING, "await(empty(n), parity(n) ^ 1);", "await(empty(n), parity(n));", "grouped", DEADLOCK, False),
    Fault("phase of full flipped", RING, "await(full(n), parity(n));", "await(full(n), parity(n) ^ 1);", "grouped", UNAWAITED),
    Fault("a phase a use", RING, "uint32_t(n / Stages) & 1;", "uint32_t(n) & 1;", "grouped"),
    Fault("loaded before it is empty", RING, "    await_empty(n);\n    announce", "    announce", "grouped"),
    Fault("half the bytes expected", RING, "announce(n, kBytes)", "announce(n, kBytes / 2)", "grouped"),
    Fault("a reader too many", RING, "uint32_t(readers)", "uint32_t(readers + 1)", "grouped", DEADLOCK),
    Fault("stages share their barriers", RING, "uint32_t(n % Stages) * 16;", "0;", "grouped"),
    Fault("stages share their buffers", RING, "uint32_t(n % Stages) * kBytes;", "0;", "grouped"),
    Fault("the first panel twice", RING, "full(n), p * 64, row", "full(n), 0, row", "full"),
    Fault("panels on top of each other", RING, "buffer(n) + p * kPanelBytes", "buffer(n)", "full"),
    # what the kernels share
    Fault("barriers not made visible", WARPGROUP, "    ptx::fence_mbarrier_init();\n", "", "grouped",
          "not made visible to the async proxy"),
    Fault("barriers used before they are there", WARPGROUP, "  }\n  ptx::syncthreads();\n", "  }\n", "grouped"),
    Fault("a step of a product too short", TILE, "i % 4 * 32), accumulate", "i % 4 * 16), accumulate", "grouped"),
    Fault("the second panel of rows", TILE, "a + i / 4 * RingA::kPanelBytes", "a", "full"),
    Fault("the second panel of columns", TILE, "i * 2 * kSwizzleAtom, RingB::kPanelBytes)", "i * 2 * kSwizzleAtom, 0)", "full"),
    Fault("half the rows of values", TILE, "i * 2 * kSwizzleAtom", "i * kSwizzleAtom", "grouped"),
    Fault("the other consumer's rows", TILE, "consumer() * 64 * kSwizzleRow", "(1 - consumer()) * 64 * kSwizzleRow", "grouped"),
    Fault("no fence before weights are multiplied", TILE, "  ptx::wgmma_fence();\n  PT_UNROLL\n  for (int i = 0; i < S;",
          "  PT_UNROLL\n  for (int i = 0; i < S;", "grouped", "without a wgmma.fence"),
    Fault("cleared before they are there", TILE, "  ring.await_full(use);\n", "", "lengths"),
    Fault("cleared without a fence", TILE, "  ptx::fence_proxy_async();\n", "", "lengths", "fence"),
    Fault("cleared without a barrier", TILE, "  ptx::bar_sync(kClearBarrier, 128 * Consumers);\n", "", "lengths", LATE),
    Fault("hidden values kept", TILE, "if (first >= keep.lo && first + R::kRows <= keep.hi) return;", "return;", "lengths"),
    Fault("one value too many cleared", TILE, "if (!keep.has(first +", "if (!keep.has(1 + first +", "lengths"),
    Fault("the next rows of memory kept", TILE, "s.row_k + seen.hi == p.total_keys : seen.hi == p.num_keys", "true : true", "lengths"),
    Fault("a tile cut for the last rows taken whole", TILE, "s.keys_of(p, first + 63).lo", "s.keys_of(p, first).lo", "window"),
    Fault("a tile cut for the first rows taken whole", TILE, "s.keys_of(p, first).hi}", "s.keys_of(p, first + 63).hi}", "causal"),
    Fault("the tiles of another block", TILE, "n += int(gridDim.x)", "n += int(gridDim.x) + 1", "full"),
    Fault("results not exchanged", TILE, "      transpose_quad(words);\n", "", "grouped"),
    Fault("columns past the last written", TILE, "&& column < out.columns)", ")", "causal, grouped"),
    Fault("released by one consumer", WARPGROUP, "if (threadIdx.x % 128 == 0) ring", "if (threadIdx.x == 128) ring", "grouped", DEADLOCK),
    Fault("words exchanged with another lane", QUAD, "shfl_xor_u32(odd ? w[0] : w[1], 1)", "shfl_xor_u32(odd ? w[0] : w[1], 3)", "grouped"),
    # forward
    Fault("keys not awaited", FWD, "          k.await_full(visit + 1);\n", "", "grouped", UNAWAITED),
    Fault("queries not awaited", FWD, "        q.await_full(turn);\n", "", "grouped", UNAWAITED),
    Fault("values not awaited", FWD, "          v.await_full(visit);\n", "", "grouped", UNAWAITED),
    Fault("scores not awaited", FWD, WAIT, "", "grouped", TOUCHED),
    Fault("weights written under their product", FWD, WAIT_ALL + RELEASE, "          pack(first);\n" + WAIT_ALL + RELEASE,
          "grouped", "A registers were changed"),
    Fault("values released too early", FWD, WAIT_ALL + RELEASE, RELEASE + WAIT_ALL, "grouped", LATE),
    Fault("queries released at every visit", FWD, "if (t == w.range.first) release", "release", "grouped"),
    Fault("nobody's first turn", FWD, "    if (consumer() == 1) pass_turn();\n", "", "grouped", DEADLOCK),
    Fault("the turn kept", FWD, "          pass_turn();\n          look_up", "          look_up", "grouped", DEADLOCK),
    Fault("no decay of the outputs", FWD, "o[i] *= rows.decay[i / 2 % 2];", "o[i] *= 1.0f;", "grouped"),
    Fault("no decay of the sums", FWD, "rows.sum[r] * rows.decay[r]", "rows.sum[r]", "grouped"),
    Fault("lse without its maximum's scale", FWD, "rows.max[r] : rows.max[r] * p.scale", "rows.max[r] : rows.max[r]", "one tile"),
    Fault("terms of other columns", TILE, "at.after(8 * c)", "at.after(4 * c)", "ALiBi"),
    Fault("what dropout drops kept", FWD, "kept & bit ? x[n][r] : 0.0f", "x[n][r]", "T5, dropout"),
    Fault("values of another head", FWD, "v.load(visit, args.v, row + t * BN, w.h / p.group", "v.load(visit, args.v, row + t * BN, 0",
          "causal, grouped"),
    # lookups: boolean masks, segments as bits; floating terms in pairs and one by one; what is made again
    Fault("sixteen other keys", LOOKUPS, "64 * c + 16 * quarter;", "64 * c + 16 * (3 - quarter);", "mask", slow=False),
    Fault("bits of another lane's keys", LOOKUPS, "<< 4 * (quarter ^ x);", "<< 4 * quarter;", "mask"),
    Fault("a lane's bits left out", LOOKUPS, "for (int x = 0; x < 4; ++x) {", "for (int x = 0; x < 3; ++x) {", "mask"),
    Fault("bytes of a mask turned round", LOOKUPS, "for (int w = 3; w >= 0; --w) word", "for (int w = 0; w < 4; ++w) word", "mask"),
    Fault("sixteen keys where fewer are aligned", LOOKUPS, "p_.mask.together == 16", "p_.mask.together >= 1", "mask, odd"),
    Fault("keys of a mask past the last", LOOKUPS, "most(0, least(key, p_.num_keys - 1))", "most(0, key)", "mask, odd", OUTSIDE),
    Fault("queries of a mask past the last", LOOKUPS, "least(w.i0 + own_row(r), p_.num_queries - 1)", "w.i0 + own_row(r)",
          "mask, odd", OUTSIDE),
    Fault("a mask's bytes of the other row", LOOKUPS, "mask + rows[r] + key", "mask + rows[0] + key", "mask, odd"),
    Fault("a mask of another head", LOOKUPS, "w.b * d.batch + w.h * d.head", "w.b * d.batch", "mask, odd"),
    Fault("a mask of another sequence", LOOKUPS, "w.b * d.batch + w.h * d.head", "w.h * d.head", "mask"),
    Fault("a column too many below", LOOKUPS, "least(x % 8, 2)", "least(x % 8 + 1, 2)", "mask"),
    Fault("keys before a row's first", LOOKUPS, " & ~columns_below(bounds.lo - column);", ";", "window and bias"),
    Fault("a segment of the other row", LOOKUPS, "segment == own[r]", "segment == own[0]", "segments"),
    Fault("segments of 32 bits", LOOKUPS, "segment == own[r]", "int32_t(segment) == int32_t(own[r])", "segments and causal"),
    Fault("the part of a set", LOOKUPS, "1u << k << part", "1u << k", "segments"),
    Fault("the second half of float32 pairs", LOOKUPS, "if (c > 0 && c % (kKept / 4) == 0) load_pairs(w, d, column, c);", "", "f32 bias"),
    Fault("the second half of pairs", LOOKUPS, "if (c > 0 && c % (kKept / 2) == 0) load_pairs(w, d, column, c);", "", "bf16 mask"),
    Fault("a pair's first twice", LOOKUPS, ">> 16 * (r % 2));", ">> 0 * (r % 2));", "f16 bias"),
    Fault("pairs past the last key", LOOKUPS, "return uint32_t(key) < uint32_t(p_.num_keys);", "return true;", "f16 bias", OUTSIDE),
    Fault("a term shows what another hides", LOOKUPS, " || x[n][r] == minus_infinity();", ";", "finfo.min"),
    Fault("large terms overflow", LOOKUPS, "sum < -kFloatMax ? -kFloatMax : sum;", "sum;", "finfo.min"),
    Fault("the second term left out", LOOKUPS, "which <= 2; ++which", "which < 2; ++which", "f32 mask and bias"),
    Fault("the paired term added twice", LOOKUPS, " || which == paired_) continue;", ") continue;", "f16 bias"),
    Fault("scores not hidden in the first tile", FWD, "        look_up(first);\n        ptx::wgmma_wait<0>();",
          "        ptx::wgmma_wait<0>();",
          "mask"),
    Fault("bits of the tile before", FWD, "          look_up(first);\n", "          if (t % 2) look_up(first);\n", "mask"),
    Fault("no flag raised", FWD, "if (K::looks_up && not_finite(o, factor)) raise", "if (K::looks_up && p.group == 0) raise",
          "hidden keys"),
    Fault("the flag of another tile", REDO, "redo.flags + head * redo.tiles + row / redo.rows, 1", "redo.flags + head * redo.tiles, 1",
          "hidden keys, dropout"),
    Fault("the flag of another head", REDO, "redo.flags + head * redo.tiles + row", "redo.flags + row", "hidden keys"),
    Fault("infinities are finite", REDO, "return zero != 0.0f;  // NaN", "return false;", "hidden keys"),
    # backward over queries
    Fault("gradients of outputs not awaited", QUERIES, "        d_out.await_full(turn);\n", "", "grouped", UNAWAITED),
    Fault("scores not awaited, over queries", QUERIES, "        ptx::wgmma_wait<1>();\n        weigh", "        weigh", "grouped", TOUCHED),
    Fault("keys released too early", QUERIES, WAIT + "          release_products(k, visit - 1);",
          "          release_products(k, visit - 1);\n" + WAIT, "grouped", LATE),
    Fault("keys released too early at the end", QUERIES, "        ptx::wgmma_wait<0>();\n        release_products(k, visit++);",
          "        release_products(k, visit++);\n        ptx::wgmma_wait<0>();", "grouped", LATE),
    Fault("delta forgotten, over queries", QUERIES, "less_delta<T>(x, delta[r])", "less_delta<T>(x, 0.0f)", "grouped"),
    Fault("dP not hidden", QUERIES, "        hide(dp, first);\n", "", "lengths"),
    Fault("the scale of d_query", QUERIES, "? 0.0f : p.scale;", "? 0.0f : 1.0f;", "grouped"),
    Fault("keys that nobody sees kept", QUERIES, "        clear_rows<kConsumers>(k, visit, first, keep);\n", "", "lengths"),
    # backward over keys
    Fault("scores not awaited, over keys", KEYS, "        ptx::wgmma_wait<1>();\n", "", "grouped", TOUCHED),
    Fault("products not awaited", KEYS, "dk, ds, q, visit);\n        ptx::wgmma_wait<0>();\n", "dk, ds, q, visit);\n", "grouped"),
    Fault("numbers not announced", KEYS, "        if (lane_id() == 0) q.announce(visit);\n", "", "grouped", DEADLOCK),
    Fault("numbers announced too early", KEYS, "        ptx::syncwarp();\n" + ANNOUNCE, ANNOUNCE, "grouped", LATE),
    Fault("numbers released too early", KEYS, "        ptx::syncwarp();\n" + RELEASES, RELEASES, "grouped", LATE),
    Fault("numbers written while they are read", KEYS, "        q.await_empty(visit);\n", "", "grouped"),
    Fault("delta's sign", KEYS, "-row.delta);", "row.delta);", "grouped"),
    Fault("the numbers of another stage", KEYS, "uint32_t(visit % (kTile.stages + K::more_queries) * kNumbers)", "0", "grouped", LATE),
    Fault("a head of a group left out", KEYS, "h < (hk + 1) * p.group; ++h)", "h < hk * p.group + 1; ++h)", "grouped"),
    Fault("tiles from the first on", KEYS, "t == first ? last - 1 : t - 1;", "t == first ? last - 1 : first;", "causal"),
    Fault("scores not hidden", KEYS, "        hide(s);\n", "", "causal"),
    Fault("queries that see nothing kept", KEYS, "          clear_rows<kConsumers>(q, visit, t * BN, keep);\n", "", "lengths"),
    Fault("gradients that see nothing kept", KEYS, "          clear_rows<kConsumers>(d_out, visit, t * BN, keep);\n", "", "lengths"),
    Fault("keys kept for the next tile", KEYS, "        release_products(k, turn);\n", "", "grouped", DEADLOCK),
    Fault("the scale of d_key", KEYS, "dk_factor[r] = nobody ? 0.0f : p.scale", "dk_factor[r] = nobody ? 0.0f : 1.0f", "grouped"),
    # terms in the backward
    Fault("the unit of d_value's weights", KEYS, ": kWeightUnit<T>;", ": 1.0f;", "weights of all sizes"),
    Fault("bits of other columns", GRADIENTS, "<< n % 32;", "<< 0;", "dropout"),
    Fault("rows of another warp", GRADIENTS, "thread / 32 * 16 - 64", "thread / 32 * 16 - 48", "ALiBi", slow=False),
    Fault("softcap's slope forgotten, over queries", QUERIES, "dp[i] *= s[i];", "dp[i] *= 1.0f;", "softcap"),
    Fault("dP of dropped weights, over queries", QUERIES, "kept.has(i) ? dp[i] * p.keep_scale : 0.0f", "dp[i] * p.keep_scale", "dropout"),
    Fault("hidden dP kept, over queries", QUERIES, "seen.has(i) ? dp[i] : 0.0f", "dp[i]", "dropout"),
    Fault("sums of rows behind the last query", QUERIES, "w.i0 + consumer() * 64 + 64 > w.s.num_q", "false", "ALiBi, lengths"),
    Fault("sums of dS after softcap's slope", QUERIES, "gradients.add(g, dp, w,", "if (p.softcap != 0) for (int i = 0; i < BN / 2; ++i) "
          "dp[i] *= s[i]; gradients.add(g, dp, w,", "T5 of one direction, softcap"),
    Fault("half of a diagonal", SUMS, "(c > 0 ? ds[4 * c - 4 + e] : 0.0f) + (", "(", "T5, dropout"),
    Fault("diagonals read too early", SUMS, "pair[1]);\n    }\n    sync();\n", "pair[1]);\n    }\n", "T5, dropout"),
    Fault("diagonals written too early", SUMS, "    sync();  // the tile before has been read\n", "", "T5, dropout", LATE),
    Fault("the last sum read too early", SUMS, "slope.a, 0.0f);\n    sync();\n", "slope.a, 0.0f);\n", "ALiBi", LATE),
    Fault("tiles too far below added above", SUMS, "if (below) below_ += sum;", "if (!below) below_ += sum;", "T5, dropout"),
    Fault("both consumers' parts in one", SUMS, "w.i0 / 64 + consumer();", "w.i0 / 64;", "T5, dropout"),
    Fault("the sign of the slopes' gradient", SUMS, "slope_ -= ds[i]", "slope_ += ds[i]", "ALiBi, lengths"),
    Fault("diagonals too far below from too near on", SUMS, "low = d <= -p.before", "low = d <= 17 - p.before", "T5, dropout"),
    Fault("distances of the first consumer", SUMS, "own_row(0) % 64", "own_row(0)", "ALiBi"),
    Fault("another head's slope", KEYS, "        if (K::general && t == first) ++h;\n", "", "ALiBi"),
    Fault("dropped weights kept, over keys", KEYS, "kept.has(4 * (c + n) + r) ? x[n][r] : 0.0f", "x[n][r]", "dropout"),
    Fault("dP of dropped weights, over keys", KEYS, "kept.has(i) ? dp[i] * p.keep_scale : 0.0f", "dp[i] * p.keep_scale", "dropout"),
    Fault("softcap's slope forgotten, over keys", KEYS, "slope[n][r] *= x[n][r];", "slope[n][r] = x[n][r];", "softcap"),
    Fault("maxima of the first columns", KEYS, "numbers_at + 32 * (c + n)", "numbers_at + 32 * n", "ALiBi"),
    Fault("kept values of d_value not scaled", KEYS, "? p.keep_scale * kWeightUnit<T>", "? kWeightUnit<T>", "dropout"),
    Fault("another half of the weights", GRADIENTS, "uint16_t(w >> 16)", "uint16_t(w)", "grouped"),
    # all three gradients at once, d_query added across blocks
    Fault("a part stored over the one before", FUSED, "      if (!first) part_of(consumer()).await_empty(visit - 1);\n", "",
          "grouped, unordered", LATE, False),
    Fault("a part added before it is read", FUSED, "      ptx::bulk_wait_read<0>();\n", "", "grouped, unordered"),
    Fault("a part not awaited", FUSED, "      part.await_full(visit);\n", "", "grouped, unordered"),
    Fault("a part without a fence", FUSED, "    ptx::fence_proxy_async();\n    ptx::syncwarp();\n", "    ptx::syncwarp();\n",
          "full, unordered", "fence.proxy.async"),
    Fault("a part announced too early", FUSED, "    ptx::syncwarp();\n    if (lane_id() == 0) part", "    if (lane_id() == 0) part",
          "full, unordered", LATE),
    Fault("dS without a fence", FUSED, "ds[i]);\n    ptx::fence_proxy_async();\n", "ds[i]);\n", "grouped, unordered", "fence.proxy.async"),
    Fault("dS of the other consumer not awaited", FUSED, "    ptx::bar_sync(kStored, 128 * kConsumers);\n", "",
          "grouped, unordered", "", False),
    Fault("dS in one buffer", FUSED, "gradients.buffer(visit)", "gradients.buffer(0)", "grouped, unordered", LATE),
    Fault("dS not swizzled", FUSED, "swizzle128(thread / 32 * 16 + thread % 16, thread % 32 / 16)",
          "(thread / 32 * 16 + thread % 16) * 128 + thread % 32 / 16 * 16", "grouped, unordered"),
    Fault("dS's second panel", FUSED, "i / 4 * RingGradients::kPanelBytes, ds", "0, ds", "grouped, unordered"),
    Fault("the first queries twice", FUSED, "consumer() * RingGradients::kPanelBytes", "0", "grouped, unordered"),
    Fault("the first columns twice", FUSED, "consumer() * RingOwn::kPanelBytes", "0", "full, unordered"),
    Fault("part not awaited before it is handed over", FUSED, "      ptx::wgmma_wait<0>();\n      d_out.await", "      d_out.await",
          "full, unordered"),
    Fault("scores not awaited, unordered", FUSED, "      ptx::wgmma_wait<first ? 0 : 1>();\n", "", "full, unordered", TOUCHED),
    Fault("dP not awaited", FUSED, "      ptx::wgmma_wait<1>();\n      each", "      each", "full, unordered", TOUCHED),
    Fault("queries released under dS Q", FUSED, "ds);\n      ptx::wgmma_wait<0>();\n", "ds);\n", "full, unordered"),
    Fault("delta forgotten, unordered", FUSED, "(x + delta)", "(x + 0.0f)", "full, unordered"),
    Fault("scores not hidden, unordered", FUSED, "e = r != row || bounds.has(column) ? e : 0.0f;", "", "causal, unordered"),
    Fault("keys that nobody sees kept, unordered", FUSED, "      clear_rows<kConsumers>(k, 0, w.j0, keep);\n", "", "lengths, unordered"),
    Fault("values that nobody sees kept, unordered", FUSED, "      clear_rows<kConsumers>(v, 0, w.j0, keep);\n", "", "lengths, unordered"),
    Fault("gradients that see nothing kept, unordered", FUSED, "        clear_rows<kConsumers>(d_out, visit, t * BN, noted(2));\n", "",
          "lengths, unordered"),
    Fault("keys that are not there weigh something", FUSED, "w.j0 + (consumer() + 1) * 64 <= w.s.num_k ?", "true ?", "one key, unordered"),
    Fault("tiles not visited all round", FUSED, "t == range.lo ? range.hi - 1 : t - 1;", "t == range.lo ? range.hi - 1 : range.lo;",
          "many keys, unordered"),
    Fault("added to another tile", FUSED, "(first + tile) * kRows", "first * kRows", "full, unordered"),
    Fault("the sums of other queries", FUSED, "i0 % kTile * K::head_dim", "0", "grouped, unordered"),
    Fault("the scale of d_query, unordered", FUSED, ".empty() ? 0.0f : p.scale;", ".empty() ? 0.0f : 1.0f;", "full, unordered"),
)  # fmt: skip


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    # Which of the kernels show it; forward, too, what they share.
    only = "sm90_bwd_fused.cu" if fault.file == FUSED else "sm90_bwd.cu" if "sm90_bwd" in fault.file else "sm90_fwd.cu"
    check_caught(fault, "sm90_problems", "attention", builder, tmp_path, only, "sm90")
