// Defines the parameters of the sm_90 backward kernels that depend on the call. As in ForwardPlan,
// the values that every call reads are contiguous, and the host derives all that it can.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/divisor.h"
#include "plan/tensor_map.h"
#include "sm90/backward/mask.cuh"
#include "sm90/backward/soft_cap.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Holds the tensor maps of the operands, then those of the gradients of keys and values.
struct BackwardMaps : ForwardMaps {
  CUtensorMap dout;
};
struct KeyGradientMaps {
  CUtensorMap dkey, dvalue;
};

inline constexpr int kEdgeRows = 32;  // rows of a block of the begin kernel

// Identifies a head of a batch by its coordinates along the axes of an operand.
struct HeadIndex {
  int32_t batch, batch_axes[kTensorMapBatchDims], head;

  __device__ __forceinline__ BatchIndex batch_index() const { return BatchIndex(batch_axes); }
};
struct HeadDivisors {
  Divisor heads, inner_batch;

  HeadDivisors() = default;
  HeadDivisors(const Shape& shape, int32_t heads_of_batch)
      : heads(std::max(heads_of_batch, 1)),
        inner_batch(shape.num_batch_dims > 1
                        ? static_cast<int32_t>(std::max<int64_t>(shape.batch_dims[1], 1))
                        : 1) {}

  __device__ __forceinline__ HeadIndex at(int32_t batch_head) const {
    HeadIndex index;
    index.batch = heads.quotient(batch_head);
    index.head = batch_head - index.batch * heads.divisor;
    index.batch_axes[0] = inner_batch.quotient(index.batch);
    index.batch_axes[1] = index.batch - index.batch_axes[0] * inner_batch.divisor;
    return index;
  }
};

// Divides the zeroing of the sums for dQ, which precedes the additions of key blocks. The begin
// kernel (edges.cuh) zeroes the sums of the first heads. The sums of each other head are divided
// into as many shares as the head has key blocks: the thread block that takes a key block zeroes
// the share of a later one.
struct ZeroPlan {
  int32_t first_unit = INT32_MAX;      // first unit (BackwardCounters) that is zeroed by shares
  int32_t ahead = 0;                   // distance to the later block, in key blocks
  int32_t share = 0, unit_stores = 0;  // sizes of a share and a unit, in stores of a warp
};

// Selects the work of the end kernel that the main kernel does (conversion of dQ): see EndWarp.
struct EndPlan {
  int32_t blocks = 0;     // blocks of the main kernel that convert; 0: none does
  int32_t units = 0;      // of heads, in all batches (BackwardCounters)
  int32_t tiles = 0;      // tiles of 64 query rows, in all heads
  int32_t additions = 0;  // for each unit: two for a block, or for each of its tiles
  Divisor tiles_of_unit, tiles_of_head;
  int32_t q_len = 0, head_dim = 0;
  float scale = 1.0f;
  HeadDivisors heads;
  RowsOperand dquery;
};

// Returns how many lanes of a warpgroup, counted from its first, hold dQ of existing rows among the
// 64 rows from row0 on. The sums for dQ have places for these lanes only. Their layout is [block of
// 8 columns][lane][element].
__device__ __forceinline__ int32_t dquery_lanes(int32_t q_len, int32_t row0) {
  return fragment_lanes(min(max(q_len - row0, 0), 64));
}

// Divides key blocks among thread blocks, so that each takes a part of a key block's query tiles.
// The thread blocks add up their dK and dV: see sm90/backward/split.cuh. There are three ways.
struct SplitPlan {
  // Chunks: used if all key blocks are equally long. The last key blocks, fewer than there are
  // thread blocks, are divided: their query tiles, numbered consecutively, are cut into chunks. A
  // chunk may have tiles of two key blocks, and the later of them is computed first.
  int32_t first = INT32_MAX, chunks = 0, tiles = 0;
  Divisor chunk_tiles, block_tiles;
  // Parts: if there are enough thread blocks, every key block is divided into this many parts.
  Divisor parts;
  // Groups: if the query heads of a group have separate key blocks, this many of them share the
  // same keys.
  Divisor sharing;
  float* sums = nullptr;
  int32_t kv_heads = 1, key_tiles = 1;

  // Returns the end of the indices that thread blocks take: whole key blocks, parts and chunks.
  __device__ __forceinline__ int32_t end(int32_t blocks) const {
    return chunks > 0 ? first + chunks : blocks * parts.divisor;
  }
  // Returns the end of a chunk's tiles; 0 for any other index.
  __device__ __forceinline__ int32_t tiles_end(int32_t index) const {
    return index < first ? 0 : min((index - first + 1) * chunk_tiles.divisor, tiles);
  }
  // Returns the key block of an index. For a chunk, `left` is the end of its tiles that are not yet
  // done.
  __device__ __forceinline__ int32_t block_of(int32_t index, int32_t left = 0) const {
    if (index >= first) return first + block_tiles.quotient(left - 1);
    return parts.quotient(index);
  }
};

// Points to the counters of the main kernel:
//   taken      key blocks taken
//   zeroed     for each unit of heads, shares of zeros that are written
//   added      for each unit of heads, warps that have added all of a block's dQ
//   converted  for each thread block, tiles of dQ converted
//   sums       for each sum of dK and dV, two counters (SplitSums)
// A unit of heads has the query heads of one key block: all heads of a group, or fewer
// (heads_of_key_block()). Units are numbered over all batches.
struct BackwardCounters {
  int32_t* first;
  int32_t units;

  __device__ __forceinline__ int32_t* taken() const { return first; }
  __device__ __forceinline__ int32_t* zeroed(int32_t unit) const { return first + 1 + unit; }
  __device__ __forceinline__ int32_t* added(int32_t unit) const { return first + 1 + units + unit; }
  __device__ __forceinline__ int32_t* converted(int32_t block) const {
    return first + 1 + 2 * units + block;
  }
  __device__ __forceinline__ int32_t* sums() const { return converted(kMaxPersistentBlocks); }
};

// True if dlogits are multiplied by the scale before they are rounded to the operands' type,
// instead of dQ and dK at the end, in the kernel that computes all three gradients. Results then
// round as cuDNN's do (TUNING_backward.md, "Errors"). False for float16, whose range of exponents
// is small.
template <typename Element>
inline constexpr bool kScaledDlogits = std::is_same_v<Element, __nv_bfloat16>;

// Holds the factors of delta, applied before the main kernel, and of dQ, applied after it. In
// kernels that may add a bias (kAdds), delta is not scaled, because the bias's gradient needs the
// unscaled value. In others it is scaled, and the scale costs one instruction a tile.
struct GradientScales {
  float delta = 1.0f, dquery = 1.0f;
  bool shifts_lse = false;  // true if lse is relative to a slope's term: shifted_lse()
};
template <typename Element, bool kAdds>
GradientScales gradient_scales(const Options& options) {
  if (!kScaledDlogits<Element>) return {1.0f, options.scale};
  return {kAdds ? 1.0f : options.scale, 1.0f};
}

// Holds the parameters of the kernels that run before and after the main one (edges.cuh). `sums`:
// true if the main kernel adds to sums in device memory.
struct BackwardEdgePlan {
  Divisor tiles;  // tiles of a head
  HeadDivisors heads;
  int32_t q_len = 0, head_dim = 0, value_dim = 0;
  int32_t zeroed_heads = 0;
  int64_t counters = 0;
  bool q_len_varies = false;
  GradientScales scales;
  RowsOperand out, dout, lse, dlse, dquery;
  BackwardWorkspace workspace;

  BackwardEdgePlan() = default;
  BackwardEdgePlan(const Backward& params, const BackwardWorkspace& space,
                   const GradientScales& scaled, int64_t tiles_of_head, bool sums = false,
                   const ZeroPlan& zeros = {})
      : tiles(static_cast<int32_t>(std::max<int64_t>(tiles_of_head, 1))),
        heads(params.shape, params.shape.heads),
        q_len(params.shape.q_len),
        head_dim(params.shape.head_dim),
        value_dim(params.shape.value_dim),
        zeroed_heads(sums ? static_cast<int32_t>(std::min<int64_t>(
                                int64_t{zeros.first_unit} * space.heads_of_key_block, INT32_MAX))
                          : 0),
        counters(sums ? space.counter_words(params.shape) : 0),
        q_len_varies(bool{params.query_seq_lengths}),
        scales(scaled),
        out(params.out),
        dout(params.dout),
        lse(params.lse),
        dlse(params.dlse),
        dquery(params.dquery),
        workspace(space) {}
};

// Holds the values of the call that BackwardBlock::at() needs to describe a key block.
struct BlockPlan {
  HeadDivisors units;  // of heads: see BackwardCounters
  int32_t group = 0;   // query heads of a unit
  bool band_varies = false;
  Band band;  // unused if it varies
  ZeroPlan zeros;
  EndPlan ends;
  SplitPlan split;
  MaskRows mask_rows;
  TransposedMaskWords mask_words;
  CapPolynomial soft_cap;

  BlockPlan() = default;
  explicit BlockPlan(const Backward& params, int32_t heads_of_unit, const ZeroPlan& zeros = {},
                     const EndPlan& ends = {}, const SplitPlan& split = {},
                     const MaskRows& mask_rows = {}, const TransposedMaskWords& mask_words = {})
      : units(params.shape, params.shape.heads / heads_of_unit),
        group(heads_of_unit),
        band_varies(Band::varies(params)),
        band(params.options, params.shape.q_len, params.shape.kv_len, 0),
        zeros(zeros),
        ends(ends),
        split(split),
        mask_rows(mask_rows),
        mask_words(mask_words),
        soft_cap(params.options) {}

  __device__ __forceinline__ Band band_of(const Forward& params, const BatchIndex& batch) const {
    if (band_varies) [[unlikely]] {
      return Band(params, batch);
    }
    return band;
  }
};

// Reads every kStep-th line of 64 bytes of a kernel's parameters, from line `first` on, only to
// bring them into the cache. Otherwise, one thread would wait for the lines one after the other.
template <int kStep = 1, typename Parameters>
__device__ __forceinline__ void touch_parameters(const Parameters& params, int first = 0) {
  constexpr int kWords = sizeof(Parameters) / 4;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&params);
  uint32_t any = 0;
#pragma unroll
  for (int word = 0; word < kWords; word += 16 * kStep) {
    any |= words[min(word + first * 16, kWords - 1)];
  }
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 1; @p nanosleep.u32 0; }" ::"r"(any));
}

}  // namespace jax_flash::sm90
