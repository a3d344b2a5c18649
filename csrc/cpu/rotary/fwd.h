// SPDX-License-Identifier: Apache-2.0
// Rotary positions, forward: read a row, normalize it if there is a weight, rotate it and write it.
// A norm reads the row twice, the second time from the cache. Heads share a table row, so a task
// processes all heads of a block of positions.
#pragma once

#include <cmath>

#include "cpu/core/parallel.h"
#include "cpu/core/row_sum.h"
#include "cpu/rotary/problem.h"

namespace pt {
namespace PT_ISA {

template <class X>
INLINE const typename X::elem* row_of(const Heads& t, int64_t b, int64_t h, int64_t l) {
  return static_cast<const typename X::elem*>(t.data) + b * t.strides.b + h * t.strides.h +
         l * t.strides.l;
}
template <class X>
INLINE typename X::elem* row_of(const HeadsOut& t, int64_t b, int64_t h, int64_t l) {
  return static_cast<typename X::elem*>(t.data) + b * t.strides.b + h * t.strides.h +
         l * t.strides.l;
}

// Call f(j, lanes) for each vector of columns [first, last).
template <int WIDTH, class F>
INLINE void each_vector(int64_t first, int64_t last, const F& f) {
  int64_t j = first;
  for (; j + WIDTH <= last; j += WIDTH) f(j, std::integral_constant<int64_t, WIDTH>());
  if (j < last) f(j, last - j);
}

template <class V>
INLINE V swap_neighbours(V v) {
  return swap_(v, 1, std::make_integer_sequence<int, kWidth<V>>());
}
// Sign bits of every second lane, starting at lane FIRST. Flip them instead of multiplying by -1:
// the compiler may fuse that product into the sum in place of the intended one (GCC 12 did with
// AVX2, and the last bit differed from the GPU kernels).
template <class V, int FIRST>
INLINE ivec_of<V> every_second_sign() {
  using word = typename Lanes<scalar_of<V>>::word;
  ivec_of<V> bits{};
  UNROLL for (int i = FIRST; i < kWidth<V>; i += 2) bits[i] =
      word(uint64_t(1) << (8 * sizeof(word) - 1));
  return bits;
}

// Table row of one position.
template <class X>
struct Angles {
  const typename X::acc *cos, *sin;
  Angles(const RotaryProblem& p, int64_t b, int64_t l)
      : cos(static_cast<const typename X::acc*>(p.cos) + b * p.table_batch + l * p.turned),
        sin(static_cast<const typename X::acc*>(p.sin) + b * p.table_batch + l * p.turned) {}
};

// Call put(j, lanes, value) with the row from(j, lanes) rotated by the angles. SIGN = -1 rotates
// back.
template <class X, int SIGN, class From, class Put>
INLINE void turn_row(const RotaryProblem& p, const Angles<X>& angles, const From& from,
                     const Put& put) {
  using A = Acc<X>;
  using vec = typename X::vec;
  const auto *cos = angles.cos, *sin = angles.sin;
  if (p.interleaved) {
    const auto signs = every_second_sign<vec, (SIGN < 0)>();
    each_vector<X::width>(0, p.turned, [&](int64_t j, auto lanes) {
      const vec y = from(j, lanes), c = A::load(cos + j, lanes), s = A::load(sin + j, lanes);
      // Multiply the pair's other number by this lane's sine forward, by its partner's backward.
      const vec other = SIGN > 0 ? swap_neighbours(y) * s : swap_neighbours(vec(y * s));
      put(j, lanes, fma(y, c, (vec)((ivec_of<vec>)other ^ signs)));
    });
  } else {
    const int64_t half = p.turned / 2;
    each_vector<X::width>(0, half, [&](int64_t j, auto lanes) {
      const vec y1 = from(j, lanes), y2 = from(j + half, lanes);
      const vec c1 = A::load(cos + j, lanes), c2 = A::load(cos + j + half, lanes);
      const vec s1 = A::load(sin + j, lanes), s2 = A::load(sin + j + half, lanes);
      put(j, lanes, SIGN > 0 ? y1 * c1 - y2 * s1 : y1 * c1 + y2 * s2);
      put(j + half, lanes, SIGN > 0 ? y2 * c2 + y1 * s2 : y2 * c2 - y1 * s1);
    });
  }
  each_vector<X::width>(p.turned, p.dim,
                        [&](int64_t j, auto lanes) { put(j, lanes, from(j, lanes)); });
}

// Process one row. Write 1 / rms unless rstd is null.
template <class X, bool NORM>
INLINE void rotary_row(const RotaryProblem& p, const typename X::acc* weight,
                       const Angles<X>& angles, const typename X::elem* x, typename X::elem* out,
                       typename X::acc* rstd) {
  using acc = typename X::acc;
  using vec = typename X::vec;
  const auto put = [&](int64_t j, auto lanes, vec v) { X::store(out + j, lanes, v); };
  if constexpr (!NORM) {
    turn_row<X, 1>(p, angles, [&](int64_t j, auto lanes) { return X::load(x + j, lanes); }, put);
  } else {
    RowSum<vec> sum;
    columns<X::width>(
        p.dim,
        [&](int64_t j, int slot, auto lanes) {
          const vec v = X::load(x + j, lanes);
          sum.add_product(slot, v, v);
        },
        sum);
    const acc rs = 1 / std::sqrt(sum.total() / acc(p.dim) + acc(p.eps));
    if (rstd) *rstd = rs;
    const vec scale = set1<vec>(rs), offset = set1<vec>(acc(p.weight_offset));
    const auto normed = [&](int64_t j, auto lanes) {
      return X::load(x + j, lanes) * scale * (Acc<X>::load(weight + j, lanes) + offset);
    };
    turn_row<X, 1>(p, angles, normed, put);
  }
}

// Blocks of positions; a task takes all heads of one block. Results do not depend on the partition.
struct PositionBlocks {
  int64_t length, size, per_sequence, tasks;
  explicit PositionBlocks(const RotaryProblem& p)
      : length(p.length), size(clamp<int64_t>(4096 / p.dim, 1, 64)),
        per_sequence(ceil_div(p.length, size)), tasks(p.batch * per_sequence) {}
  int64_t sequence(int64_t task) const { return task / per_sequence; }
  int64_t first(int64_t task) const { return task % per_sequence * size; }
  int64_t last(int64_t task) const { return min(length, first(task) + size); }
};

// Call f(h, l) for the rows of a block in memory order.
template <class F>
INLINE void rows_of_block(const Strides& s, int64_t heads, int64_t first, int64_t last,
                          const F& f) {
  if (s.h < s.l) {
    for (int64_t l = first; l < last; l++)
      for (int64_t h = 0; h < heads; h++) f(h, l);
  } else {
    for (int64_t h = 0; h < heads; h++)
      for (int64_t l = first; l < last; l++) f(h, l);
  }
}

template <class X, bool NORM>
void rotary_block(const RotaryProblem& p, const RotaryForward& f, int64_t b, int64_t first,
                  int64_t last) {
  using acc = typename X::acc;
  const auto* weight = static_cast<const acc*>(f.weight);
  auto* rstd = static_cast<acc*>(f.rstd);
  rows_of_block(f.x.strides, f.x.heads, first, last, [&](int64_t h, int64_t l) {
    acc* own = rstd ? rstd + (b * f.x.heads + h) * p.length + l : nullptr;
    rotary_row<X, NORM>(p, weight, Angles<X>(p, b, l), row_of<X>(f.x, b, h, l),
                        row_of<X>(f.out, b, h, l), own);
  });
}

template <class X>
void rotary_forward(const RotaryProblem& p, const RotaryForward& f) {
  const PositionBlocks blocks(p);
  const auto run = f.weight ? rotary_block<X, true> : rotary_block<X, false>;
  for_each_task(blocks.tasks, p.threads, [&](int64_t task) {
    run(p, f, blocks.sequence(task), blocks.first(task), blocks.last(task));
  });
}

}  // namespace PT_ISA
}  // namespace pt
