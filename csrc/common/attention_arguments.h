// SPDX-License-Identifier: Apache-2.0
// The arguments that attention's raw ops share, after query, key, value and their outputs.
//
// The bindings (csrc/cpu, csrc/cuda) make parameters, schemas and a struct of this list, the fast
// path the type of the raw op. Python fills the arguments by name: see bind() in
// pytransformer/ops/_problem/attention.py.
//
// X(type, name, type in the schema). MaybeTensor is an optional tensor of the including file.
#pragma once

#define PT_ATTENTION_ARGUMENTS(X)           \
  X(MaybeTensor, mask, "Tensor?")           \
  X(MaybeTensor, bias, "Tensor?")           \
  X(MaybeTensor, slopes, "Tensor?")         \
  X(MaybeTensor, sinks, "Tensor?")          \
  X(MaybeTensor, query_lengths, "Tensor?")  \
  X(MaybeTensor, key_lengths, "Tensor?")    \
  X(MaybeTensor, prefix_lengths, "Tensor?") \
  X(MaybeTensor, query_segments, "Tensor?") \
  X(MaybeTensor, key_segments, "Tensor?")   \
  X(MaybeTensor, cu_seqlens_q, "Tensor?")   \
  X(MaybeTensor, cu_seqlens_k, "Tensor?")   \
  X(MaybeTensor, block_offsets, "Tensor?")  \
  X(MaybeTensor, block_entries, "Tensor?")  \
  X(MaybeTensor, block_bits, "Tensor?")     \
  X(MaybeTensor, page_table, "Tensor?")     \
  X(MaybeTensor, key_scale, "Tensor?")      \
  X(MaybeTensor, value_scale, "Tensor?")    \
  X(MaybeTensor, dropout_seed, "Tensor?")   \
  X(int64_t, align, "int")                  \
  X(int64_t, left, "int")                   \
  X(int64_t, right, "int")                  \
  X(int64_t, global_keys, "int")            \
  X(int64_t, batch_start, "int")            \
  X(int64_t, head_start, "int")             \
  X(int64_t, query_start, "int")            \
  X(int64_t, key_start, "int")              \
  X(int64_t, num_queries, "int")            \
  X(int64_t, num_keys, "int")               \
  X(double, scale, "float")                 \
  X(double, softcap, "float")               \
  X(double, dropout_p, "float")

// T5's bias: the CPU kernels read the table by buckets.
#define PT_CPU_ATTENTION_ARGUMENTS(X)      \
  PT_ATTENTION_ARGUMENTS(X)                \
  X(MaybeTensor, table, "Tensor?")         \
  X(MaybeTensor, bucket_starts, "Tensor?") \
  X(bool, bidirectional, "bool")

// The CUDA kernels read T5's bias by diagonals, of which `before` lie before the first key. They
// read a block mask by keys too, and list the blocks of a dense mask if requested.
#define PT_CUDA_ATTENTION_ARGUMENTS(X)         \
  PT_ATTENTION_ARGUMENTS(X)                    \
  X(MaybeTensor, diagonals, "Tensor?")         \
  X(MaybeTensor, key_block_offsets, "Tensor?") \
  X(MaybeTensor, key_block_entries, "Tensor?") \
  X(bool, list_mask, "bool")                   \
  X(int64_t, before, "int")

#define PT_PARAMETER(type, name, schema) , type name
#define PT_VALUE(type, name, schema) name,
#define PT_SCHEMA(type, name, schema) ", " schema " " #name
#define PT_MEMBER(type, name, schema) type name;
