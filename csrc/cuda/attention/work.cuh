// What a block works on: a tile of queries and the tiles of keys that they see, or the other way round.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/tile/matrix_tile.cuh"

namespace pt::cuda {

// `Rows` queries of one head, and the tiles of `Streamed` keys that some of them see.
template <int Rows, int Streamed>
struct QueryTile {
  int b, h, i0, origin;  // i0: the first query; origin: where the tiles of keys begin
  Sequence s;
  Tiles range;

  PT_DEVICE QueryTile(const AttentionProblem& p, const Sequence& s, int b, int h, int tile)
      : b(b), h(h), i0(tile * Rows), origin(key_origin(p)), s(s),
        range(least(Rows, s.num_q - i0), s.keys_of(p, i0), s.keys_of(p, least(i0 + Rows, s.num_q) - 1), origin, Streamed) {}

  // This block's, of a grid of sequences, heads and tiles. With causality tiles with the most keys come first.
  static PT_DEVICE QueryTile of_block(const AttentionProblem& p) {
    const int tiles = (p.num_queries + Rows - 1) / Rows, bh = int(blockIdx.x) / tiles, tile = int(blockIdx.x) % tiles;
    return {p, Sequence(p, bh / p.heads), bh / p.heads, bh % p.heads, p.causal ? tiles - 1 - tile : tile};
  }

  // The keys that query i may see: none if it is not there.
  PT_DEVICE Range bounds(const AttentionProblem& p, int i) const { return i < s.num_q ? s.keys_of(p, i) : Range{0, 0}; }

  // Start to copy the queries' rows of a tensor that has `columns`, and those of tile t of keys: zeros where nothing is seen.
  template <class T, int RowBytes>
  PT_DEVICE void copy_queries(SmemTile<RowBytes> to, const In& from, int columns) const {
    copy_rows<Rows>(to, head_of<T>(from, b, h, s.row_q), from.stride.row, i0, 0, s.num_q, columns, Products<T>::chunks(columns));
  }
  template <class T, int RowBytes>
  PT_DEVICE void copy_keys(SmemTile<RowBytes> to, const In& from, int columns, int t, int group) const {
    copy_rows<Streamed>(to, head_of<T>(from, b, h / group, s.row_k), from.stride.row, origin + t * Streamed, range.start, range.end,
                        columns, Products<T>::chunks(columns));
  }
};

// `Rows` keys from j0 on of one head of keys, and the tiles of `Streamed` queries, in each of its query heads, that see some of them. j0 is
// negative where dropout's groups begin before the first key.
template <int Rows, int Streamed>
struct KeyTile {
  int b, hk, j0;
  Sequence s;
  Tiles range;

  PT_DEVICE KeyTile(const AttentionProblem& p, int b, int hk, int j0)
      : b(b), hk(hk), j0(j0), s(p, b), range(least(j0 + Rows, s.num_k) - most(j0, s.first_k), s.queries_of(p, most(j0, s.first_k)),
                                             s.queries_of(p, least(j0 + Rows, s.num_k) - 1), 0, Streamed) {}

  // The queries that may see key j: none if it is not there, or hidden from all.
  PT_DEVICE Range bounds(const AttentionProblem& p, int j) const {
    return j >= s.first_k && (!s.holes || j >= s.num_k || KeyWords(p, b).visible(j)) ? unhidden_bounds(p, j) : Range{0, 0};
  }
  // The same but for padding: what a hidden row makes stays in it.
  PT_DEVICE Range unhidden_bounds(const AttentionProblem& p, int j) const {
    return j >= 0 && j < s.num_k ? s.queries_of(p, j) : Range{0, 0};
  }

  template <class T, int RowBytes>
  PT_DEVICE void copy_keys(SmemTile<RowBytes> to, const In& from, int columns) const {
    copy_rows<Rows>(to, head_of<T>(from, b, hk, s.row_k), from.stride.row, j0, 0, s.num_k, columns, Products<T>::chunks(columns));
  }
  template <class T, int RowBytes>
  PT_DEVICE void copy_queries(SmemTile<RowBytes> to, const In& from, int columns, int t, int h) const {
    copy_rows<Streamed>(to, head_of<T>(from, b, h, s.row_q), from.stride.row, t * Streamed, range.start, range.end, columns,
                        Products<T>::chunks(columns));
  }
};

}  // namespace pt::cuda
