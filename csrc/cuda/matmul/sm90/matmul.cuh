// SPDX-License-Identifier: Apache-2.0
// Warpgroup gemms on sm_90a: out = epilogue(A B), with float32 sums of 16-bit elements.
//
// Persistent blocks process tiles of 128 rows and 256 columns, or 128 columns if wide tiles would
// be too few. One thread loads steps of 64 along k into a ring. Two consumer warpgroups multiply 64
// rows each, with one step's wgmmas in flight while the next step's start, and pass their
// accumulators to the epilogue; the ring meanwhile fills with the next tile's steps. The first
// consumer leads by a few steps, so its epilogue overlaps the second consumer's last gemms, and the
// second's epilogue overlaps the next tile's first gemms.
//
// Gated: a half tile has 64 columns of each of two products that share A. Per half, a stage of B
// has 64 columns of one operand, then 64 of the other, and one wgmma multiplies with all of them.
// Elements i and i + 32 of a lane are the sums of the first and the second product at the same
// place. Two tiles in turn would read A twice from global memory, separate accumulators would read
// it twice from shared memory, and interleaved weights would need a copy.
//
// An epilogue E is a struct, part of the kernel's parameters, with
//   kScratch   bytes of shared memory per consumer
//   kPanels    number of matrices of T with the result's shape that it reads: they come
//              through the same ring, 64 columns at a time
//   begin(place) const                  work that overlaps a tile's gemms; place is the
//                                       tile's first half
//   finish<T>(place, x, panels) const   processes a consumer's accumulators of half a tile.
//                                       Every thread of the consumer calls it. With kPanels > 0
//                                       it calls panels.visit once, in order, for each panel
//                                       that place.has_panel reports.
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
  int halves;             // halves per tile
  int64_t rows, columns;  // of the result
  int steps[2];           // steps along k of the first and the second pair of operands
};

using MatmulRing = Buffers<kMatmulTile.stages, kMatmulTile.stage_bytes()>;

// Position of a consumer's accumulators of half a tile in the result. A lane's element i is row
// own(i / 2 % 2), column first(i / 4) + i % 2.
struct MatmulPlace {
  // the consumer's first row, the half's first column; the result's size
  int64_t row, column, rows, columns;
  int half;
  uint32_t scratch;

  PT_DEVICE int64_t own(int r) const { return row + warp_row() % 64 + lane_id() / 4 + 8 * r; }
  PT_DEVICE int64_t first(int eight) const { return column + 8 * eight + 2 * (lane_id() % 4); }
  // Return true if any of the half's 64 columns from 64 `panel` on is in the result.
  PT_DEVICE bool has_panel(int panel) const { return column + kPanelColumns * panel < columns; }
};

// Reads 64 columns of a matrix in accumulator layout.
struct PanelReader {
  uint32_t address;  // of the consumer's rows

  // words[2 c + r]: a pair of columns of the lane's row r in the panel's n-block eight + c. Every
  // lane of the warp calls it.
  PT_DEVICE void load(uint32_t (&words)[4], int eight) const {
    const int matrix = lane_id() / 8;
    const int row = warp_row() % 64 + lane_id() % 8 + 8 * (matrix % 2), chunk = eight + matrix / 2;
    ptx::ldmatrix_x4(address + swizzle128(uint32_t(row), uint32_t(chunk)), words);
  }
};

// A tile's panels, which follow its steps in the ring: one per matrix for each 64 columns.
struct MatmulPanels {
  static constexpr uint32_t kBytes = uint32_t(kMatmulTile.rows()) * kSwizzleRow;
  const MatmulRing& ring;
  int& use;

  // Call f(readers) with the panels of the next 64 columns.
  template <int Count, class F>
  PT_DEVICE void visit(F f) const {
    PanelReader readers[Count];
    ring.consumer_wait(use);
    PT_UNROLL
    for (int i = 0; i < Count; ++i)
      readers[i].address = ring.buffer(use) + i * kBytes + uint32_t(consumer() * 64 * kSwizzleRow);
    f(readers);
    ptx::fence_proxy_async();  // ldmatrix has read what TMA writes next
    consumer_release_warp(ring, use);
    ++use;
  }
};

template <class T, class K, class E>
struct Sm90Matmul {
  static constexpr MatmulTile kTile = kMatmulTile;
  static constexpr int kHalf = kHalfColumns / K::products;                                // columns
  static constexpr int kHalfSums = kHalfColumns / 2, kConsumers = 128 * kTile.consumers;  // threads
  // bytes of half of B per stage
  static constexpr uint32_t kHalfBytes = uint32_t(kHalfColumns * kTile.step * 2);
  static_assert(E::kScratch <= kMatmulMaxScratch &&
                E::kPanels * MatmulPanels::kBytes <= MatmulRing::kBytes);

  const MatmulArgs<E>& args;
  MatmulRing ring;
  uint32_t scratch;

  // Call f(first row, first column) for each tile of this block.
  template <class F>
  PT_DEVICE void for_each_tile(F f) const {
    for (int n = int(blockIdx.x); n < args.grid.tiles(); n += int(gridDim.x)) {
      const TileAt at = tile_at(args.grid, n);
      f(at.row * kTile.rows(), at.column * args.halves * kHalf);
    }
  }
  PT_DEVICE int steps() const { return args.steps[0] + args.steps[1]; }
  // Return the number of panels per matrix of the epilogue.
  PT_DEVICE int panels(int column) const {
    const int64_t left = args.columns - column, wide = args.halves * kHalf;
    return E::kPanels > 0 ? int(((left < wide ? left : wide) + kPanelColumns - 1) / kPanelColumns)
                          : 0;
  }

  PT_DEVICE void begin() const {
    PT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || args.steps[i]) ptx::prefetch_tensor_map(args.a[i]);
      if (i == 0 || args.steps[i] || K::gated) ptx::prefetch_tensor_map(args.b[i]);
      if (i < E::kPanels) ptx::prefetch_tensor_map(args.panels[i]);
    }
    ring.init(1, kTile.readers(), "full", "empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    int use = 0;
    for_each_tile([&](int row, int column) {
      for (int pair = 0; pair < 2; ++pair)
        for (int s = 0; s < args.steps[pair]; ++s)
          load_step(use++, pair, s * kTile.step, row, column);
      if constexpr (E::kPanels > 0)
        for (int p = 0; p < panels(column); ++p)
          load_panels(use++, row, column + p * kPanelColumns);
    });
  }

  // Load 64 columns of A and B from k on. For a panel fully outside, load another panel instead:
  // its sums are not stored.
  PT_DEVICE void load_step(int use, int pair, int k, int row, int column) const {
    const uint32_t bar = ring.full(use), a = ring.buffer(use), b = a + kTile.a_bytes();
    constexpr uint32_t kPanel = uint32_t(kTile.step * kSwizzleRow);
    // boxes per half of B
    constexpr int kPartials = K::b_by_k ? kHalf / kPanelColumns : K::products;
    const auto inside = [](int first, int64_t size) {
      return first < size ? first : int(size - 1) / kPanelColumns * kPanelColumns;
    };
    ring.producer_acquire(use);
    ring.producer_commit(use, kTile.a_bytes() + uint32_t(args.halves) * kHalfBytes);
    if constexpr (K::a_by_k) {
      PT_UNROLL
      for (int p = 0; p < kTile.rows() / kPanelColumns; ++p) {
        const int first = row + p * kPanelColumns;
        ptx::tma_load_2d(a + p * kPanel, args.a[pair], bar, inside(first, args.rows), k);
      }
    } else {
      ptx::tma_load_2d(a, args.a[pair], bar, k, row);
    }
    for (int h = 0; h < args.halves; ++h) {
      const uint32_t half = b + uint32_t(h) * kHalfBytes;
      const int half_column = column + h * kHalf;
      PT_UNROLL
      for (int q = 0; q < kPartials; ++q) {
        const ptx::TensorMap& map = args.b[K::gated ? q : pair];
        const uint32_t to = half + q * (kHalfBytes / kPartials);
        const int first = half_column + (K::gated ? 0 : q * (kHalf / kPartials));
        if constexpr (K::b_by_k) ptx::tma_load_2d(to, map, bar, inside(first, args.columns), k);
        else ptx::tma_load_2d(to, map, bar, k, inside(first, args.columns));
      }
    }
  }

  PT_DEVICE void load_panels(int use, int row, int column) const {
    ring.producer_acquire(use);
    ring.producer_commit(use, E::kPanels * MatmulPanels::kBytes);
    PT_UNROLL
    for (int i = 0; i < E::kPanels; ++i) {
      const uint32_t to = ring.buffer(use) + i * MatmulPanels::kBytes;
      ptx::tma_load_2d(to, args.panels[i], ring.full(use), column, row);
    }
  }

  // Separate code per width: where the two paths merge, ptxas would copy accumulators in flight.
  PT_DEVICE void consume() const {
    if (args.halves == 2) consume_tiles<2>();
    else consume_tiles<1>();
  }

  template <int Halves>
  PT_DEVICE void consume_tiles() const {
    int use = 0;
    for_each_tile([&](int row, int column) {
      const auto place = [&](int h) {
        const uint32_t own = scratch + uint32_t(consumer()) * E::kScratch;
        return MatmulPlace{
            row + consumer() * 64, column + h * kHalf, args.rows, args.columns, h, own};
      };
      float x[Halves * kHalfSums];
      make_sums(x, use, [&] { args.epilogue.begin(place(0)); });
      PT_UNROLL
      for (int h = 0; h < Halves; ++h) {
        if (h > 0 && column + kHalf >= args.columns) continue;
        args.epilogue.template finish<T>(place(h),
                                         reinterpret_cast<float (&)[kHalfSums]>(x[h * kHalfSums]),
                                         MatmulPanels{ring, use});
      }
    });
  }

  // Run all steps of a tile. The first consumer leads the second by kTile.lead steps, but never by
  // two tiles.
  template <int N, class F>
  PT_DEVICE void make_sums(float (&x)[N], int& use, F begin) const {
    const bool leads = kTile.lead > 0 && steps() >= kTile.stages, first = consumer() == 0;
    // the step after which the second consumer starts
    const int last_led = leads && first ? kTile.lead - 1 : -1;
    if (leads && !first) ptx::bar_sync(3, kConsumers);
    for (int s = 0; s < steps(); ++s, ++use) {
      ring.consumer_wait(use);
      multiply(x, use, s > 0);
      if (s == last_led) ptx::bar_arrive(3, kConsumers);
      if (s == 0) begin();
      ptx::wgmma_wait<1>();  // the previous step
      if (s > 0) consumer_release_warp(ring, use - 1);
    }
    ptx::wgmma_wait<0>();
    consumer_release_warp(ring, use - 1);
  }

  // x (+)= the consumer's 64 rows of a step of A, times a step of B. 16 elements along k are 32
  // bytes within the swizzle's rows, or two groups of eight rows.
  template <int N>
  PT_DEVICE void multiply(float (&x)[N], int use, bool accumulate) const {
    constexpr uint32_t kPanel = uint32_t(kTile.step * kSwizzleRow);
    constexpr uint32_t kInside = 32, kGroups = 2 * kSwizzleAtom;
    const uint32_t a = ring.buffer(use) + uint32_t(consumer() * 64 * kSwizzleRow),
                   b = ring.buffer(use) + kTile.a_bytes();
    static_assert(conforms(product_of_tiles(2 * N, K::a_by_k, K::b_by_k, kPanel)));
    // a consumer's rows start at one offset in both layouts of A
    static_assert(kPanel == 64 * kSwizzleRow);
    ptx::wgmma_fence();
    PT_UNROLL
    for (int i = 0; i < kTile.step / 16; ++i)
      ptx::wgmma_ss<T, 2 * N, K::b_by_k, K::a_by_k>(
          x, swizzled(a + i * (K::a_by_k ? kGroups : kInside), kPanel),
          swizzled(b + i * (K::b_by_k ? kGroups : kInside), kPanel), accumulate || i > 0);
    ptx::wgmma_commit();
  }

  static PT_DEVICE void run(const MatmulArgs<E>& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem()),
                   scratch = base + MatmulRing::kBufferBytes;
    const uint32_t barriers = scratch + uint32_t(kTile.consumers) * E::kScratch;
    static_assert(kMatmulSlack + MatmulRing::kBufferBytes + kTile.consumers * E::kScratch +
                      MatmulRing::kBarrierBytes ==
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
