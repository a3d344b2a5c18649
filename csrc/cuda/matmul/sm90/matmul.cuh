// SPDX-License-Identifier: Apache-2.0
// Products by warpgroups on sm_90a: out = epilogue(A B), float32 sums of 16-bit elements.
//
// Persistent blocks take tiles of 128 rows and 256 columns, or 128 where those would be too few. One thread loads steps of 64 along k into
// a ring; two consumer warpgroups multiply 64 rows each, one step's products in flight while the next step's begin, and hand their sums to
// the epilogue, under which the ring fills with the next tile's steps. The first consumer leads by a few steps, so that it has its epilogue
// under the other's last products, and the other has its own under the first products of the next tile. Or, with ping_pong, each has tiles
// of its own, whose steps come by one ring, tile after tile, and one multiplies under the other's epilogue.
//
// Gated, a half of a tile is 64 columns of each of two products that share A: a stage of B has, for each half, 64 columns of one operand
// and then 64 of the other, one wgmma multiplies with all, and lane and element i of a half hold a sum of the first product, i + 32 that of
// the second at the same place. Two tiles in turn would read A twice; accumulators of their own would read it twice from shared memory;
// interleaved weights would have to be copied.
//
// An epilogue E is a struct, part of the kernel's parameters, with
//   kScratch   bytes of shared memory that a consumer has for itself
//   kPanels    how many matrices of T, of the result's shape, it reads: they come by the same ring, 64 columns at a time
//   begin(place) const                  what can be done under a tile's products: the place is that of its first half
//   finish<T>(place, x, panels) const   what becomes of a consumer's sums of half a tile. Every thread of the consumer calls it. With
//              kPanels > 0 it calls panels.visit once for each panel that place.has_panel, in order.
#pragma once

#include "cuda/matmul/sm90/plan.h"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/product_shapes.h"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/vectors.cuh"
#include "cuda/tile/warpgroup.cuh"

namespace pt::cuda {

template <class E>
struct MatmulArgs {
  ptx::TensorMap a[2], b[2], panels[2];
  E epilogue;
  TileGrid grid;
  int halves;             // of a tile
  int64_t rows, columns;  // of the result
  int steps[2];           // along k, of the first and the second pair of operands
};

using MatmulRing = Buffers<kMatmulTile.stages, kMatmulTile.stage_bytes()>;

// Which 64 rows of a tile the consumer has.
PT_DEVICE int tile_part() { return kMatmulTile.ping_pong && !PT_FAULT(the_other_consumers_part_of_a_tile) ? 0 : consumer(); }

// Where a consumer's sums of half a tile are in the result. Of a lane's, element i is row own(i / 2 % 2), column first(i / 4) + i % 2.
struct MatmulPlace {
  int64_t row, column, rows, columns;  // the consumer's first row, the half's first column; the result's size
  int half;
  uint32_t scratch;

  PT_DEVICE int64_t own(int r) const { return row + warp_row() % 64 + lane_id() / 4 + 8 * r; }
  PT_DEVICE int64_t first(int eight) const { return column + 8 * eight + 2 * (lane_id() % 4); }
  // Whether any of the half's 64 columns from 64 `panel` on is there.
  PT_DEVICE bool has_panel(int panel) const { return column + kPanelColumns * panel < columns; }
};

// 64 columns of a matrix at the places of the lane's sums.
struct PanelReader {
  uint32_t address;  // of the consumer's rows

  // words[2 c + r]: a pair of the lane's row r, of the eight columns number eight + c of the panel. Every lane of the warp calls it.
  PT_DEVICE void load(uint32_t (&words)[4], int eight) const {
    const int matrix = lane_id() / 8, lower = PT_FAULT(matrices_of_a_panel_exchanged) ? matrix / 2 : matrix % 2;
    const int row = warp_row() % 64 + lane_id() % 8 + 8 * lower, chunk = eight + matrix / 2;
    const int at = PT_FAULT(a_panel_not_swizzled) ? chunk ^ row % 8 : chunk;
    ptx::ldmatrix_x4(address + swizzle128(uint32_t(row), uint32_t(at)), words);
  }
};

// A tile's panels, which come by the ring behind its steps: for each 64 columns one of each matrix.
struct MatmulPanels {
  static constexpr uint32_t kBytes = uint32_t(kMatmulTile.rows()) * kSwizzleRow;
  const MatmulRing& ring;
  int& use;

  // f(readers) with those of the next 64 columns.
  template <int Count, class F>
  PT_DEVICE void visit(F f) const {
    PanelReader readers[Count];
    const int part = PT_FAULT(a_panels_rows_of_the_other_consumer) ? 0 : tile_part();
    if (!PT_FAULT(panels_not_awaited)) ring.consumer_wait(use);
    PT_UNROLL
    for (int i = 0; i < Count; ++i) readers[i].address = ring.buffer(use) + i * kBytes + uint32_t(part * 64 * kSwizzleRow);
    if (PT_FAULT(panels_released_before_they_are_read)) consumer_release_warp(ring, use);
    f(readers);
    if (!PT_FAULT(panels_given_back_without_a_fence)) ptx::fence_proxy_async();  // ldmatrix has read what TMA writes next
    if (!PT_FAULT(panels_not_released)) consumer_release_warp(ring, use);
    ++use;
  }
};

template <class T, class K, class E>
struct Sm90Matmul {
  static constexpr MatmulTile kTile = kMatmulTile;
  static constexpr int kHalf = kHalfColumns / K::products;                                // columns of a product
  static constexpr int kHalfSums = kHalfColumns / 2, kConsumers = 128 * kTile.consumers;  // threads
  static constexpr uint32_t kHalfBytes = uint32_t(kHalfColumns * kTile.step * 2);         // of a stage of B
  static_assert(E::kScratch <= kMatmulMaxScratch && E::kPanels * MatmulPanels::kBytes <= MatmulRing::kBytes);
  static_assert(!kTile.ping_pong || E::kPanels == 0);  // a consumer could not tell the phases of the other's panels

  const MatmulArgs<E>& args;
  MatmulRing ring;
  uint32_t scratch;

  // f(the tile's first row, its first column).
  template <class F>
  PT_DEVICE void for_each_tile(F f) const {
    for (int n = int(blockIdx.x); n < args.grid.tiles(); n += PT_FAULT(every_block_makes_all_tiles) ? 1 : int(gridDim.x)) {
      const TileAt at = tile_at(args.grid, n);
      f(at.row * kTile.rows(), at.column * (PT_FAULT(narrow_tiles_a_wide_one_apart) ? 2 : args.halves) * kHalf);
    }
  }
  PT_DEVICE int steps() const { return args.steps[0] + args.steps[1]; }
  // Of each of the epilogue's matrices.
  PT_DEVICE int panels(int column) const {
    const int64_t left = args.columns - column, wide = args.halves * kHalf;
    return E::kPanels > 0 ? int(((left < wide ? left : wide) + kPanelColumns - 1) / kPanelColumns) : 0;
  }

  PT_DEVICE void begin() const {
    PT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || args.steps[i]) ptx::prefetch_tensor_map(args.a[i]);
      if (i == 0 || args.steps[i] || K::gated) ptx::prefetch_tensor_map(args.b[i]);
      if (i < E::kPanels) ptx::prefetch_tensor_map(args.panels[i]);
    }
    ring.init(1, PT_FAULT(stages_wait_for_both) ? 4 * kTile.consumers : kTile.readers(), "full", "empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    int use = 0;
    for_each_tile([&](int row, int column) {
      for (int pair = 0; pair < 2; ++pair)
        for (int s = 0; s < args.steps[pair]; ++s)
          load_step(use++, PT_FAULT(the_second_loop_from_the_first_operands) ? 0 : pair, s * kTile.step, row, column);
      if constexpr (E::kPanels > 0)
        for (int p = 0; p < (PT_FAULT(panels_of_the_first_columns_only) ? 1 : panels(column)); ++p)
          load_panels(use++, row, column + p * kPanelColumns);
    });
  }

  // 64 columns of A and of B from k on. A panel that would lie wholly outside is another once more: its sums go nowhere.
  PT_DEVICE void load_step(int use, int pair, int k, int row, int column) const {
    const uint32_t bar = ring.full(use), a = ring.buffer(use), b = a + kTile.a_bytes();
    constexpr uint32_t kPanel = uint32_t(kTile.step * kSwizzleRow);
    constexpr int kPartials = K::b_by_k ? kHalf / kPanelColumns : K::products;  // boxes of half of B
    const auto inside = [](int first, int64_t size) { return first < size ? first : int(size - 1) / kPanelColumns * kPanelColumns; };
    if (!PT_FAULT(a_step_loaded_before_its_stage_is_empty)) ring.producer_acquire(use);
    ring.producer_commit(use, kTile.a_bytes() + (PT_FAULT(fewer_bytes_committed) ? 0 : uint32_t(args.halves)) * kHalfBytes);
    if constexpr (K::a_by_k) {
      PT_UNROLL
      for (int p = 0; p < kTile.rows() / kPanelColumns; ++p) {
        const int first = row + (PT_FAULT(the_first_panel_of_a_twice) ? 0 : p) * kPanelColumns;
        ptx::tma_load_2d(a + p * kPanel, args.a[pair], bar, inside(first, args.rows), k);
      }
    } else {
      ptx::tma_load_2d(a, args.a[pair], bar, k, row);
    }
    for (int h = 0; h < args.halves; ++h) {
      const uint32_t half = b + uint32_t(PT_FAULT(both_halves_of_b_in_one_place) ? 0 : h) * kHalfBytes;
      const int half_column = column + (PT_FAULT(the_first_half_of_b_twice) ? 0 : h) * kHalf;
      PT_UNROLL
      for (int q = 0; q < kPartials; ++q) {
        const ptx::TensorMap& map = args.b[K::gated && !PT_FAULT(half_a_gated_stage_loaded_twice) ? q : pair];
        const uint32_t to = half + (PT_FAULT(panels_of_b_on_top_of_each_other) ? 0 : q) * (kHalfBytes / kPartials);
        const int first = half_column + (K::gated || PT_FAULT(the_first_panel_of_b_in_each_place) ? 0 : q * (kHalf / kPartials));
        if constexpr (K::b_by_k) ptx::tma_load_2d(to, map, bar, inside(first, args.columns), k);
        else ptx::tma_load_2d(to, map, bar, k, inside(first, args.columns));
      }
    }
  }

  PT_DEVICE void load_panels(int use, int row, int column) const {
    if (!PT_FAULT(panels_loaded_before_their_stage_is_empty)) ring.producer_acquire(use);
    ring.producer_commit(use, E::kPanels * MatmulPanels::kBytes);
    const int first = PT_FAULT(the_panel_of_other_columns) ? 0 : column;
    PT_UNROLL
    for (int i = 0; i < E::kPanels; ++i) {
      const uint32_t to = ring.buffer(use) + (PT_FAULT(matrices_panels_on_top_of_each_other) ? 0 : i) * MatmulPanels::kBytes;
      ptx::tma_load_2d(to, args.panels[i], ring.full(use), first, row);
    }
  }

  // Apart for each width: where paths met, ptxas would copy sums in flight.
  PT_DEVICE void consume() const {
    if (args.halves == 2) consume_tiles<2>();
    else consume_tiles<1>();
  }

  template <int Halves>
  PT_DEVICE void consume_tiles() const {
    int use = 0, n = 0;
    for_each_tile([&](int row, int column) {
      const Turn turn = turn_of(n++);
      if (!turn.mine) {
        if (!PT_FAULT(the_other_consumers_steps_not_passed_over)) use += steps() + panels(column);
        return;
      }
      const auto place = [&](int h) {
        const uint32_t own = scratch + uint32_t(PT_FAULT(consumers_share_their_scratch) ? 0 : consumer()) * E::kScratch;
        const int first = column + (PT_FAULT(both_halves_of_a_result_in_one_place) ? 0 : h) * kHalf;
        return MatmulPlace{row + tile_part() * 64, first, args.rows, args.columns, h, own};
      };
      float x[Halves * kHalfSums];
      make_sums(x, use, turn, [&] { args.epilogue.begin(place(0)); });
      PT_UNROLL
      for (int h = 0; h < Halves; ++h) {
        if (h > 0 && (column + kHalf >= args.columns || PT_FAULT(the_second_half_left_out))) continue;
        args.epilogue.template finish<T>(place(h), reinterpret_cast<float (&)[kHalfSums]>(x[h * kHalfSums]), MatmulPanels{ring, use});
      }
    });
  }

  // Of a consumer, in the block's tile number n: whether it is one of its own, whether it waits for the other before its first products,
  // and behind which step it lets the other begin (-1: none).
  struct Turn {
    bool mine, awaits;
    int passes;
  };
  // A shared tile: the first consumer leads, but not where it could be two tiles ahead. Tiles of their own: a consumer begins when the last
  // step of the tile before has come. Earlier its own would be further than the ring is long, where a barrier's parity tells nothing.
  PT_DEVICE Turn turn_of(int n) const {
    const bool first = consumer() == 0;
    if constexpr (kTile.ping_pong) {
      const bool more = int(blockIdx.x) + (n + 1) * int(gridDim.x) < args.grid.tiles();
      const int whose = PT_FAULT(the_other_consumers_tile) ? 0 : consumer();
      const int last = PT_FAULT(a_turn_too_early) ? 0 : steps() - 1;
      Turn turn{n % kTile.consumers == whose, n > 0, more && !PT_FAULT(a_turn_not_passed) ? last : -1};
      if (PT_FAULT(each_consumer_makes_every_tile)) turn.mine = true;
      if (PT_FAULT(the_first_tile_waits_for_its_turn)) turn.awaits = true;
      return turn;
    } else {
      const bool leads = kTile.lead > 0 && (steps() >= kTile.stages || PT_FAULT(a_lead_longer_than_a_tile));
      const bool passes = leads && first != PT_FAULT(led_by_itself);
      return {true, leads && !first, passes && !PT_FAULT(nobody_is_led_on) ? kTile.lead - 1 : -1};
    }
  }
  static PT_DEVICE void scheduler_barrier_sync() {
    if (consumer() == 0) ptx::bar_sync(3, kConsumers);
    else ptx::bar_sync(4, kConsumers);
  }
  static PT_DEVICE void scheduler_barrier_arrive() {
    if ((consumer() == 0) != PT_FAULT(a_turn_passed_to_itself)) ptx::bar_arrive(4, kConsumers);
    else ptx::bar_arrive(3, kConsumers);
  }

  // All steps of a tile.
  template <int N, class F>
  PT_DEVICE void make_sums(float (&x)[N], int& use, const Turn& turn, F begin) const {
    const int behind = PT_FAULT(the_step_itself_released) ? 0 : 1;  // the step that is released
    if (turn.awaits && !PT_FAULT(order_barrier_dropped)) scheduler_barrier_sync();
    for (int s = 0; s < steps(); ++s, ++use) {
      if (!PT_FAULT(a_step_not_awaited)) ring.consumer_wait(use);
      multiply(x, use, s > 0 || PT_FAULT(the_sums_of_the_tile_before_kept));
      if (s == turn.passes) scheduler_barrier_arrive();
      if (s == 0) begin();
      if (!PT_FAULT(a_step_released_too_early)) ptx::wgmma_wait<1>();  // the step before
      if (s >= behind) consumer_release_warp(ring, use - behind);
    }
    if (!PT_FAULT(sums_not_awaited)) ptx::wgmma_wait<0>();
    if (!PT_FAULT(the_last_step_not_released)) consumer_release_warp(ring, use - 1);
  }

  // x (+)= the consumer's 64 rows of a step of A, times a step of B. 16 along k are 32 bytes inside the swizzle's rows, or two groups of
  // eight rows.
  template <int N>
  PT_DEVICE void multiply(float (&x)[N], int use, bool accumulate) const {
    constexpr uint32_t kPanel = uint32_t(kTile.step * kSwizzleRow);
    const uint32_t inside = PT_FAULT(a_step_along_k_too_short) ? 16 : 32;
    const uint32_t groups = (PT_FAULT(half_the_rows_of_a_step) ? 1 : 2) * kSwizzleAtom;
    const uint32_t panel_of_b = PT_FAULT(panels_of_columns_in_one_place) ? 0 : kPanel;
    const int part = PT_FAULT(the_other_consumers_rows_of_a) ? 1 - tile_part() : tile_part();
    const uint32_t a = ring.buffer(use) + uint32_t(part * 64 * kSwizzleRow), b = ring.buffer(use) + kTile.a_bytes();
    static_assert(conforms(product_of_tiles(2 * N, K::a_by_k, K::b_by_k, kPanel)));
    static_assert(kPanel == 64 * kSwizzleRow);  // so that a consumer's rows begin alike, however A lies
    if (!PT_FAULT(a_product_without_its_fence)) ptx::wgmma_fence();
    PT_UNROLL
    for (int i = 0; i < kTile.step / 16; ++i)
      ptx::wgmma_ss<T, 2 * N, K::b_by_k, K::a_by_k>(x, swizzled(a + i * (K::a_by_k ? groups : inside), kPanel),
                                                    swizzled(b + i * (K::b_by_k ? groups : inside), panel_of_b), accumulate || i > 0);
    ptx::wgmma_commit();
  }

  static PT_DEVICE void run(const MatmulArgs<E>& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem()), scratch = base + MatmulRing::kBufferBytes;
    const uint32_t barriers = scratch + uint32_t(kTile.consumers) * E::kScratch;
    static_assert(kMatmulSlack + MatmulRing::kBufferBytes + kTile.consumers * E::kScratch + MatmulRing::kBarrierBytes ==
                  matmul_smem(kTile, E::kScratch));
    run_block(Sm90Matmul{args, MatmulRing(base, barriers), scratch});
  }
};

template <class T, class K, class E>
__global__ void __launch_bounds__(kMatmulTile.threads(), 1)
    sm90_matmul_kernel([[maybe_unused]] const __grid_constant__ MatmulArgs<E> args) {
#if PT_SM90A
  Sm90Matmul<T, K, E>::run(args);
#endif
}

}  // namespace pt::cuda
