// SPDX-License-Identifier: Apache-2.0
// Attention's kernel layer, without torch, against double loops: see test_standalone.py.
#include "standalone.h"

#include "cpu/attention/problem.h"

namespace pt {
namespace PT_ISA {
extern const AttentionKernels attention_kernels;
}
}  // namespace pt

namespace {

using pt::Align;
using pt::AttentionProblem;
using pt::DType;

struct Case {
  const char* name;
  DType dtype;
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  std::function<void(AttentionProblem&)> change;
};

// The tensors of a case by name; the loops then read like the formulas.
struct Inputs {
  Tensor q, k, v, d_out, bias, slopes, table, sinks;
  std::vector<uint8_t> mask = {};
  std::vector<int64_t> query_lengths = {}, key_lengths = {}, prefix_lengths = {},
                       query_segments = {}, key_segments = {};
};
constexpr int64_t kStarts[] = {0, 1, 2, 3, 5, 9, 16, 40}, kBuckets = 16;

Inputs draw(const Case& c) {
  Normal normal;
  const DType t = c.dtype, work = work_type(t);
  Inputs in{normal(t, c.B * c.Hq * c.Lq * c.D),
            normal(t, c.B * c.Hkv * c.Lk * c.D),
            normal(t, c.B * c.Hkv * c.Lk * c.Dv),
            normal(t, c.B * c.Hq * c.Lq * c.Dv),
            normal(work, c.Lq * c.Lk),
            normal(work, c.Hq),
            normal(work, kBuckets * c.Hq),
            normal(work, c.Hq)};
  for (double& slope : in.slopes.values) slope = std::fabs(slope) / 16;
  in.slopes = Tensor(work, in.slopes.values);
  for (int64_t i = 0; i < c.Lq * c.Lk; i++) in.mask.push_back(i * 2654435761u % 97 > 30);
  for (int64_t b = 0; b < c.B; b++) {
    in.query_lengths.push_back(c.Lq - 3 * b), in.key_lengths.push_back(c.Lk - 1 - 5 * b),
        in.prefix_lengths.push_back(4 + b);
    for (int64_t i = 0; i < c.Lq; i++) in.query_segments.push_back(i / 7 % 3);
    for (int64_t j = 0; j < c.Lk; j++) in.key_segments.push_back(j / 5 % 3);
  }
  return in;
}

struct Solution {
  Numbers out, lse, dq, dk, dv, d_bias, d_slopes, d_table, d_sinks;
};

int64_t offset_of(const Case& c, const AttentionProblem& p, int64_t b) {
  if (p.align != Align::bottom_right) return 0;
  return (p.key_lengths ? p.key_lengths[b] : c.Lk) - (p.query_lengths ? p.query_lengths[b] : c.Lq);
}
bool visible(const Case& c, const AttentionProblem& p, const Inputs& in, int64_t b, int64_t i,
             int64_t j) {
  const int64_t at = i + offset_of(c, p, b);
  if (p.query_lengths && i >= p.query_lengths[b]) return false;
  if (p.key_lengths && j >= p.key_lengths[b]) return false;
  if (p.align != Align::none && j > at && !(p.prefix_lengths && j < p.prefix_lengths[b]))
    return false;
  if ((p.left >= 0 && j < at - p.left) || (p.right >= 0 && j > at + p.right)) return false;
  if (p.query_segments && in.query_segments[b * c.Lq + i] != in.key_segments[b * c.Lk + j])
    return false;
  return !p.mask.data || in.mask[i * c.Lk + j];
}
int64_t bucket(const AttentionProblem& p, int64_t distance) {
  const int64_t n = p.buckets / 2;  // of one direction
  int64_t u = n - 1;
  while (u > 0 && kStarts[u] > std::abs(distance)) u--;
  return u + (distance > 0 ? n : 0);
}

// Compute the outputs of one query of one head, and its parts of the gradients.
void solve_row(const Case& c, const AttentionProblem& p, const Inputs& in, int64_t b, int64_t h,
               int64_t i, Solution* s) {
  const int64_t kv = b * c.Hkv + h / (c.Hq / c.Hkv), row = (b * c.Hq + h) * c.Lq + i,
                offset = offset_of(c, p, b);
  const bool live = !p.query_lengths || i < p.query_lengths[b];
  Numbers score(c.Lk, -INFINITY), slope(c.Lk, 1), d_weight(c.Lk), weight(c.Lk), keep(c.Lk);
  double most = p.sinks && live ? in.sinks[h] : -INFINITY, sum = 0, delta = 0;
  for (int64_t j = 0; j < c.Lk; j++) {
    if (!visible(c, p, in, b, i, j)) continue;
    double x = 0;
    for (int64_t u = 0; u < c.D; u++) x += in.q[row * c.D + u] * in.k[(kv * c.Lk + j) * c.D + u];
    x *= p.scale;
    if (p.softcap > 0)
      slope[j] = 1 - std::pow(std::tanh(x / p.softcap), 2),
      x = p.softcap * std::tanh(x / p.softcap);
    if (p.bias.data) x += in.bias[i * c.Lk + j];
    if (p.slopes) x -= in.slopes[h] * std::abs(j - i - offset);
    if (p.table) x += in.table[bucket(p, j - i - offset) * c.Hq + h];
    score[j] = x, most = std::max(most, x);
  }
  s->lse[row] = -INFINITY;
  if (most == -INFINITY) return;
  for (double x : score) sum += std::exp(x - most);
  if (p.sinks) sum += std::exp(in.sinks[h] - most);
  s->lse[row] = most + std::log(sum);
  for (int64_t j = 0; j < c.Lk; j++) {
    weight[j] = std::exp(score[j] - most) / sum;
    keep[j] = dropout_scale(p.seed, p.drop_threshold, j, uint32_t(i), uint32_t(h), uint32_t(b));
    for (int64_t u = 0; u < c.Dv; u++) {
      s->out[row * c.Dv + u] += keep[j] * weight[j] * in.v[(kv * c.Lk + j) * c.Dv + u];
      d_weight[j] += keep[j] * in.d_out[row * c.Dv + u] * in.v[(kv * c.Lk + j) * c.Dv + u];
    }
    delta += weight[j] * d_weight[j];
  }
  if (p.sinks) s->d_sinks[h] -= std::exp(in.sinks[h] - most) / sum * delta;
  for (int64_t j = 0; j < c.Lk; j++) {
    if (weight[j] == 0) continue;
    const double d = weight[j] * (d_weight[j] - delta), d_product = d * slope[j] * p.scale;
    s->d_bias[i * c.Lk + j] += d, s->d_slopes[h] -= d * std::abs(j - i - offset);
    if (p.table) s->d_table[bucket(p, j - i - offset) * c.Hq + h] += d;
    for (int64_t u = 0; u < c.D; u++) {
      s->dq[row * c.D + u] += d_product * in.k[(kv * c.Lk + j) * c.D + u];
      s->dk[(kv * c.Lk + j) * c.D + u] += d_product * in.q[row * c.D + u];
    }
    for (int64_t u = 0; u < c.Dv; u++)
      s->dv[(kv * c.Lk + j) * c.Dv + u] += keep[j] * weight[j] * in.d_out[row * c.Dv + u];
  }
}

pt::Strides strides(int64_t heads, int64_t rows, int64_t d) {
  return {heads * rows * d, rows * d, d, 1};
}

// All terms; a case removes some.
AttentionProblem problem(const Case& c, Inputs& in, Tensor& out, Tensor& lse) {
  AttentionProblem p{};
  p.dtype = c.dtype, p.B = c.B, p.Hq = c.Hq, p.Hkv = c.Hkv, p.Lq = c.Lq, p.Lk = c.Lk, p.D = c.D,
  p.Dv = c.Dv;
  p.q = in.q.data(), p.k = in.k.data(), p.v = in.v.data(), p.out = out.data(), p.lse = lse.data();
  p.qs = strides(c.Hq, c.Lq, c.D), p.ks = strides(c.Hkv, c.Lk, c.D),
  p.vs = strides(c.Hkv, c.Lk, c.Dv), p.os = strides(c.Hq, c.Lq, c.Dv);
  p.lse_s = {c.Hq * c.Lq, c.Lq, 1, 1};
  p.mask.data = in.mask.data(), p.mask.boolean = true, p.mask.stride = {0, 0, c.Lk, 1};
  p.bias.data = in.bias.data(), p.bias.dtype = in.bias.dtype(), p.bias.stride = {0, 0, c.Lk, 1};
  p.slopes = in.slopes.data(), p.table = in.table.data(), p.bucket_starts = kStarts,
  p.buckets = kBuckets, p.bidirectional = true;
  p.sinks = in.sinks.data(), p.query_lengths = in.query_lengths.data(),
  p.key_lengths = in.key_lengths.data();
  p.prefix_lengths = in.prefix_lengths.data(), p.query_segments = in.query_segments.data(),
  p.key_segments = in.key_segments.data();
  p.left = p.right = -1, p.scale = 1 / std::sqrt(double(c.D)), p.seed = 0xfedcba9876543210,
  p.threads = 3;
  c.change(p);
  return p;
}

void run(const Case& c, Judge& judge) {
  Inputs in = draw(c);
  const DType work = work_type(c.dtype);
  Tensor out(c.dtype, in.d_out.size()), lse(work, c.B * c.Hq * c.Lq), dq(c.dtype, in.q.size()),
      dk(c.dtype, in.k.size()), dv(c.dtype, in.v.size()), d_bias(work, in.bias.size()),
      d_slopes(work, c.Hq), d_table(work, in.table.size()), d_sinks(work, c.Hq);
  const AttentionProblem p = problem(c, in, out, lse);
  pt::AttentionGrads g{};
  g.d_out = in.d_out.data(), g.dos = p.os, g.dq = dq.data(), g.dqs = p.qs, g.dk = dk.data(),
  g.dks = p.ks, g.dv = dv.data(), g.dvs = p.vs;
  if (p.bias.data) g.d_bias = {d_bias.data(), p.bias.stride};
  if (p.slopes) g.d_slopes = d_slopes.data();
  if (p.table) g.d_table = d_table.data();
  if (p.sinks) g.d_sinks = d_sinks.data();
  pt::PT_ISA::attention_kernels.forward(p);
  pt::PT_ISA::attention_kernels.backward(p, g);

  Solution s{Numbers(out.size()), Numbers(lse.size()),     Numbers(dq.size()),
             Numbers(dk.size()),  Numbers(dv.size()),      Numbers(d_bias.size()),
             Numbers(c.Hq),       Numbers(d_table.size()), Numbers(c.Hq)};
  for (int64_t row = 0; row < c.B * c.Hq * c.Lq; row++)
    solve_row(c, p, in, row / (c.Hq * c.Lq), row / c.Lq % c.Hq, row % c.Lq, &s);
  judge.output("out", out, s.out), judge.output("lse", lse, s.lse);
  judge.gradient("dq", dq, s.dq, c.dtype), judge.gradient("dk", dk, s.dk, c.dtype),
      judge.gradient("dv", dv, s.dv, c.dtype);
  if (p.bias.data) judge.gradient("d_bias", d_bias, s.d_bias, c.dtype);
  if (p.slopes) judge.gradient("d_slopes", d_slopes, s.d_slopes, c.dtype);
  if (p.table) judge.gradient("d_table", d_table, s.d_table, c.dtype);
  if (p.sinks) judge.gradient("d_sinks", d_sinks, s.d_sinks, c.dtype);
}

void no_terms(AttentionProblem& p) {
  p.mask.data = p.bias.data = p.slopes = p.table = p.sinks = nullptr;
}
void no_limits(AttentionProblem& p) {
  p.query_lengths = p.key_lengths = p.prefix_lengths = p.query_segments = p.key_segments = nullptr;
}
void plain(AttentionProblem& p) { no_terms(p), no_limits(p); }

}  // namespace

int main() {
  const Case cases[] = {
      {"float32, every term", DType::f32, 2, 4, 2, 70, 90, 24, 40,
       [](AttentionProblem& p) { no_limits(p), p.softcap = 3; }},
      {"float32, plain, many keys", DType::f32, 1, 2, 2, 150, 530, 64, 64, plain},
      {"float32, lengths, prefix, causal, segments", DType::f32, 3, 2, 1, 60, 75, 20, 20,
       [](AttentionProblem& p) { no_terms(p), p.align = Align::bottom_right; }},
      {"float32, one query, split keys", DType::f32, 2, 4, 1, 1, 1500, 32, 32, plain},
      {"bfloat16, dropout, causal, window", DType::bf16, 2, 2, 2, 130, 140, 32, 24,
       [](AttentionProblem& p) {
         plain(p), p.drop_threshold = 20000, p.align = Align::top_left, p.left = 50;
       }},
      {"bfloat16, plain, many keys", DType::bf16, 1, 4, 2, 150, 530, 72, 40, plain},
      {"bfloat16, every term", DType::bf16, 2, 4, 2, 70, 90, 24, 40,
       [](AttentionProblem& p) { no_limits(p), p.softcap = 3; }},
      {"float16, mask, sinks", DType::f16, 1, 4, 2, 40, 66, 16, 16,
       [](AttentionProblem& p) { no_limits(p), p.bias.data = p.slopes = p.table = nullptr; }},
      {"float64, every term", DType::f64, 1, 2, 1, 33, 41, 12, 12,
       [](AttentionProblem& p) { no_limits(p), p.drop_threshold = 9000; }},
  };
  Judge judge;
  for (const Case& c : cases) judge.start(c.name), run(c, judge), judge.finish();
  return judge.exit_code();
}
