// Products by warpgroups on sm_90a: out = epilogue(A B), float32 sums of 16-bit elements.
//
// Persistent blocks take tiles of 128 rows and 256 columns. One thread loads steps of 64 along k into a ring; two consumer warpgroups
// multiply 64 rows each, one step's products in flight while the next step's begin, and hand their sums to the epilogue, under which the
// ring fills with the next tile's steps.
//
// Gated, a tile is 128 columns of each of two products that share A: a stage of B has 128 columns of one operand and then 128 of the other,
// one wgmma multiplies with both, and lane and element i hold a sum of the first product, i + 64 that of the second at the same place. Two
// tiles in turn would read A twice; two accumulators of 128 columns would read it twice from shared memory; interleaved weights would have
// to be copied.
//
// An epilogue E is a struct, part of the kernel's parameters, with
//   kScratch   bytes of shared memory that a consumer has for itself
//   kPanels    how many matrices of T, of the result's shape, it reads: they come by the same ring, 64 columns at a time
//   finish<T>(place, x, panels) const   what becomes of a consumer's sums. Every thread of the consumer calls it. With kPanels > 0 it calls
//              panels.visit once for each panel that place.has_panel, in order.
#pragma once

#include "cuda/matmul/plan.h"
#include "cuda/ptx/matrix.cuh"
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
  int64_t rows, columns;  // of the result
  int steps[2];           // along k, of the first and the second pair of operands
};

using MatmulRing = Buffers<kMatmulTile.stages, kMatmulTile.stage_bytes()>;

// Where a consumer's sums are in the result. Of a lane's, element i is row own(i / 2 % 2), column first(i / 4) + i % 2.
struct MatmulPlace {
  TileAt tile;
  int64_t row, column, rows, columns;  // the consumer's first row, the tile's first column; the result's size
  uint32_t scratch;

  PT_DEVICE int64_t own(int r) const { return row + warp_row() % 64 + lane_id() / 4 + 8 * r; }
  PT_DEVICE int64_t first(int eight) const { return column + 8 * eight + 2 * (lane_id() % 4); }
  // Whether any of the 64 columns from 64 `panel` on is there.
  PT_DEVICE bool has_panel(int panel) const { return column + kPanelColumns * panel < columns; }
};

// A warp speaks for its lanes, whose reads of the buffer or products with it are done.
PT_DEVICE void release_by_warp(const MatmulRing& ring, int use) {
  ptx::syncwarp();
  if (lane_id() == 0) ring.release(use);
}

// 64 columns of a matrix at the places of the lane's sums.
struct PanelReader {
  uint32_t address;  // of the consumer's rows

  // words[2 c + r]: a pair of the lane's row r, of the eight columns number eight + c of the panel. Every lane of the warp calls it.
  PT_DEVICE void load(uint32_t (&words)[4], int eight) const {
    const int matrix = lane_id() / 8, row = warp_row() % 64 + lane_id() % 8 + 8 * (matrix % 2);
    ptx::ldmatrix_x4(address + swizzle128(uint32_t(row), uint32_t(eight + matrix / 2)), words);
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
    ring.await_full(use);
    PT_UNROLL
    for (int i = 0; i < Count; ++i) readers[i].address = ring.buffer(use) + i * kBytes + uint32_t(consumer() * 64 * kSwizzleRow);
    f(readers);
    release_by_warp(ring, use++);
  }
};

template <class T, class K, class E>
struct Sm90Matmul {
  static constexpr MatmulTile kTile = kMatmulTile;
  static constexpr int kColumns = kTile.columns / K::products;  // of a product
  static_assert(E::kScratch <= kMatmulMostScratch && E::kPanels * MatmulPanels::kBytes <= MatmulRing::kBytes);

  const MatmulArgs<E>& args;
  MatmulRing ring;
  uint32_t scratch;

  template <class F>
  PT_DEVICE void for_each_tile(F f) const {
    for (int n = int(blockIdx.x); n < args.grid.tiles(); n += int(gridDim.x)) f(tile_at(args.grid, n));
  }

  PT_DEVICE void begin() const {
    PT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || args.steps[i]) ptx::prefetch_tensor_map(args.a[i]);
      if (i == 0 || args.steps[i] || K::gated) ptx::prefetch_tensor_map(args.b[i]);
      if (i < E::kPanels) ptx::prefetch_tensor_map(args.panels[i]);
    }
    ring.init(1, 4 * kTile.consumers, "full", "empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    int use = 0;
    for_each_tile([&](const TileAt& at) {
      const int row = at.row * kTile.rows(), column = at.column * kColumns;
      for (int pair = 0; pair < 2; ++pair)
        for (int s = 0; s < args.steps[pair]; ++s) load_step(use++, pair, s * kTile.step, row, column);
      if constexpr (E::kPanels > 0)
        for (int p = 0; p < kColumns && column + p < args.columns; p += kPanelColumns) load_panels(use++, row, column + p);
    });
  }

  // 64 columns of A and of B from k on. A panel that would lie wholly outside is another once more: its sums go nowhere.
  PT_DEVICE void load_step(int use, int pair, int k, int row, int column) const {
    const uint32_t bar = ring.full(use), a = ring.buffer(use), b = a + kTile.a_bytes();
    constexpr uint32_t kPanel = uint32_t(kTile.step * kSwizzleRow);
    const auto inside = [](int first, int64_t size) { return first < size ? first : int(size - 1) / kPanelColumns * kPanelColumns; };
    ring.await_empty(use);
    ring.announce(use, kTile.stage_bytes());
    if constexpr (K::a_by_k) {
      PT_UNROLL
      for (int p = 0; p < kTile.rows() / kPanelColumns; ++p)
        ptx::tma_load_2d(a + p * kPanel, args.a[pair], bar, inside(row + p * kPanelColumns, args.rows), k);
    } else {
      ptx::tma_load_2d(a, args.a[pair], bar, k, row);
    }
    PT_UNROLL
    for (int q = 0; q < K::products; ++q) {
      const ptx::TensorMap& map = args.b[K::gated ? q : pair];
      if constexpr (K::b_by_k) {
        PT_UNROLL
        for (int p = 0; p < kColumns / kPanelColumns; ++p)
          ptx::tma_load_2d(b + p * kPanel, map, bar, inside(column + p * kPanelColumns, args.columns), k);
      } else {
        ptx::tma_load_2d(b + q * kColumns * kSwizzleRow, map, bar, k, column);
      }
    }
  }

  PT_DEVICE void load_panels(int use, int row, int column) const {
    ring.await_empty(use);
    ring.announce(use, E::kPanels * MatmulPanels::kBytes);
    PT_UNROLL
    for (int i = 0; i < E::kPanels; ++i)
      ptx::tma_load_2d(ring.buffer(use) + i * MatmulPanels::kBytes, args.panels[i], ring.full(use), column, row);
  }

  PT_DEVICE void consume() const {
    int use = 0;
    const int steps = args.steps[0] + args.steps[1];
    for_each_tile([&](const TileAt& at) {
      float x[kTile.sums()];
      for (int s = 0; s < steps; ++s, ++use) {
        ring.await_full(use);
        multiply(x, use, s > 0);
        ptx::wgmma_wait<1>();  // the step before
        if (s > 0) release_by_warp(ring, use - 1);
      }
      ptx::wgmma_wait<0>();
      release_by_warp(ring, use - 1);
      const MatmulPlace place{at,           int64_t(at.row) * kTile.rows() + consumer() * 64, int64_t(at.column) * kColumns, args.rows,
                              args.columns, scratch + uint32_t(consumer()) * E::kScratch};
      args.epilogue.template finish<T>(place, x, MatmulPanels{ring, use});
    });
  }

  // x (+)= the consumer's 64 rows of a step of A, times a step of B. 16 along k are 32 bytes inside the swizzle's rows, or two groups of
  // eight rows.
  PT_DEVICE void multiply(float (&x)[kTile.sums()], int use, bool accumulate) const {
    constexpr uint32_t kPanel = uint32_t(kTile.step * kSwizzleRow), kInside = 32, kGroups = 2 * kSwizzleAtom;
    const uint32_t a = ring.buffer(use) + uint32_t(consumer() * 64 * kSwizzleRow), b = ring.buffer(use) + kTile.a_bytes();
    static_assert(kPanel == 64 * kSwizzleRow);  // so that a consumer's rows begin alike, however A lies
    ptx::wgmma_fence();
    PT_UNROLL
    for (int i = 0; i < kTile.step / 16; ++i)
      ptx::wgmma_ss<T, kTile.columns, K::b_by_k, K::a_by_k>(x, swizzled(a + i * (K::a_by_k ? kGroups : kInside), kPanel),
                                                            swizzled(b + i * (K::b_by_k ? kGroups : kInside), kPanel), accumulate || i > 0);
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
