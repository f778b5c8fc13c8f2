// Describes a call to the sm_90 forward kernel (ForwardPlan, a kernel parameter that the host
// fills), and the units of its work, which producer warps describe to consumers in shared memory
// (QueryWork, QuerySegments, KeyTileNote).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "modifiers/scores.cuh"
#include "modifiers/sinks.cuh"
#include "params.h"
#include "plan/choice.h"
#include "sm90/forward/modifier_plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Describes an operand of shape [batch] and type int32. `data` is null if the call has none.
struct BatchOperand {
  const int32_t* data = nullptr;
  int64_t batch[kTensorMapBatchDims] = {};

  BatchOperand() = default;
  explicit BatchOperand(const Operand& operand)
      : data(static_cast<const int32_t*>(operand.data)),
        batch{operand.batch[0], operand.batch[1]} {}

  __device__ __forceinline__ const int32_t* pointer(int32_t axis0, int32_t axis1) const {
    return data + axis0 * batch[0] + axis1 * batch[1];
  }
  __device__ __forceinline__ int32_t at(int32_t axis0, int32_t axis1, int32_t otherwise) const {
    return data ? *pointer(axis0, axis1) : otherwise;
  }
};

// Holds a call's band. The host computes it, unless it depends on operands, and so on the batch; a
// producer warp then does.
struct ForwardBand {
  Band band;
  bool varies = false;
  Options options;
  BatchOperand q_len, kv_len, offset, window;

  ForwardBand() = default;
  explicit ForwardBand(const Forward& params)
      : band(params.options, params.shape.q_len, params.shape.kv_len, 0),
        varies(Band::varies(params)),
        options(params.options),
        q_len(params.query_seq_lengths),
        kv_len(params.key_value_seq_lengths),
        offset(params.query_offset),
        window(params.window) {}

  // kOutOfLine: true if the code for a band that varies is a function of its own. A block's first
  // copies wait until instructions have been fetched, so the path of every call should have few of
  // them. Registers may be spilled around the function call.
  template <bool kOutOfLine>
  __device__ __forceinline__ Band of(const int32_t (&batch_axes)[kTensorMapBatchDims]) const {
    if (varies) [[unlikely]] {
      return kOutOfLine ? find_apart(batch_axes[0], batch_axes[1])
                        : find(batch_axes[0], batch_axes[1]);
    }
    return band;
  }

  __device__ __forceinline__ int32_t kv_length(int32_t axis0, int32_t axis1) const {
    return length(kv_len, band.kv_len, axis0, axis1);
  }

 private:
  __device__ __forceinline__ Band find(int32_t axis0, int32_t axis1) const {
    const Window sizes(options, window.data ? window.pointer(axis0, axis1) : nullptr);
    return Band(sizes, length(q_len, band.q_len, axis0, axis1), kv_length(axis0, axis1),
                offset.at(axis0, axis1, 0));
  }
  __device__ __noinline__ Band find_apart(int32_t axis0, int32_t axis1) const {
    return find(axis0, axis1);
  }
  static __device__ __forceinline__ int32_t length(const BatchOperand& lengths, int32_t size,
                                                   int32_t axis0, int32_t axis1) {
    return min(max(lengths.at(axis0, axis1, size), 0), size);
  }
};

// Holds the parameters that every call reads, contiguous, and derived on the host as far as
// possible. In every launch, a kernel's parameters are new to the constant cache. The first read of
// each cache line takes hundreds of clocks, for which a short call waits.
struct ForwardPlan {
  QueryTileSchedule schedule;
  BoxAxes query, key, value;
  ForwardBand band;
  int32_t q_len = 0, kv_len = 0, value_dim = 0;
  float to_log2 = 0.0f;  // factor from the kernel's logits, natural or not, to log2 units
  float dropout_scale = 1.0f;
  RowsOperand out, lse, sinks;
  ModifierPlan modifiers;
  float products_to_log2 = 0.0f;
  float most_logit = 0.0f;  // rows with greater ones are computed again: needs_exact_logits()

  ForwardPlan() = default;
  ForwardPlan(const Forward& params, const QueryTileSchedule& tiles, bool natural_logits,
              bool saturates)
      : schedule(tiles),
        query(params.query),
        key(params.key),
        value(params.value),
        band(params),
        q_len(params.shape.q_len),
        kv_len(params.shape.kv_len),
        value_dim(params.shape.value_dim),
        to_log2(natural_logits ? kLog2E : params.options.scale * kLog2E),
        dropout_scale(params.options.dropout_scale),
        out(params.out),
        lse(params.lse),
        sinks(params.sinks),
        modifiers(params, saturates),
        products_to_log2(params.options.scale * kLog2E),
        most_logit(adds_to_logits(params) ? kExtremeLse : INFINITY) {}
};

// Describes a query tile. A producer warp computes it, which saves consumers the time.
struct QueryWork {
  // Marks a block's last query tile, if Config::kMarksLast.
  static constexpr int32_t kLast = 1 << 30;

  void* out;  // points to the block's first row
  float* lse;
  Band band;
  Range attended;     // keys that some row of the block may attend to
  int32_t tile, end;  // key tiles to read: from `tile` to before `end`, which may include kLast
  int32_t row0;       // the block's first row; negative: there is no more work
  int32_t batch, head;
  float sink_log2;
  ModifierOffsets modifiers;
};

// Sets the offsets of a query tile's modifier operands.
template <uint32_t kModifiers>
__device__ __forceinline__ void set_offsets(const Forward& params, const QueryTileIndex& q,
                                            int32_t row0, ModifierOffsets& offsets) {
  // A producer that describes tiles while consumers wait finds these offsets alone.
  constexpr bool kSome =
      kModifiers != kEveryModifier && (kModifiers & (kSegments | kDistance | kDropout)) != 0;
  if constexpr (kSome) {
    // All heads share segment ids.
    const int32_t head = (kModifiers & ~(kSegments | kSoftCap)) == 0 ? 0 : q.head;
    const ModifierOffsets found(params, q.batch_axes, head);
    if constexpr ((kModifiers & kSegments) != 0) {
      offsets.query_ids = found.query_ids;
      offsets.key_ids = found.key_ids;
    }
    if constexpr ((kModifiers & kBias) != 0) offsets.bias = found.bias;
    if constexpr ((kModifiers & kMask) != 0) offsets.mask = found.mask;
    if constexpr ((kModifiers & kDistance) != 0) offsets.distance = found.distance;
    if constexpr ((kModifiers & kDropout) != 0) {
      offsets.dropout = ModifierOffsets::dropout_of(params, q.batch_axes, q.head);
    }
    return;
  }
  if constexpr (kModifiers != kNoModifier) {
    offsets = ModifierOffsets(params, q.batch_axes, q.head);
  }
  if constexpr (is_matrix(kModifiers)) {
    // Holds the offset of Q instead, for a consumer that reads Q again. There are no segments
    // here, and one more member would cost registers.
    offsets.query_ids = q.batch_axes[0] * params.query.batch[0] +
                        q.batch_axes[1] * params.query.batch[1] + q.head * params.query.head +
                        row0 * params.query.row;
  }
}

// Sets all members of `work` but the key tiles and the first row.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void describe_query_tile(const Forward& params, const ForwardPlan& plan,
                                                    const QueryTileIndex& q, const Band& band,
                                                    int32_t row0, QueryWork& work) {
  work.out = plan.out.at<Element>(q, row0);
  work.lse = plan.lse.at<float>(q, row0);
  work.band = band;
  const int32_t row_end = min(row0 + Config::kBlockQ, band.q_len);
  work.attended = {band.first_col(row0), band.end_col(row_end - 1)};
  work.batch = q.batch;
  work.head = q.head;
  set_offsets<kModifiers>(params, q, row0, work.modifiers);
  work.sink_log2 = read_sink(plan.sinks.data != nullptr, plan.sinks.at<const float>(q, 0));
}

// Holds the segments of a query tile's rows, in a block's shared memory.
struct QuerySegments {
  static constexpr int kMost = 4;
  Range run;      // contiguous key tiles that have one segment in common with all of the rows
  int32_t count;  // 0 if there are more, or if the rows of some segment are not contiguous
  int32_t id[kMost];
  Range rows[kMost];

  __device__ __forceinline__ void set_one(int32_t segment, const Range& all_rows) {
    count = 1;
    id[0] = segment;
    rows[0] = all_rows;
  }
};

// Describes a key tile and the next one, if some tiles are skipped. Consumers thus know the next
// tile before its own copy arrives.
struct KeyTileNote {
  int32_t packed;

  KeyTileNote() = default;
  // `next`: the next tile, negative after the query tile's last. `one_segment`: true if all keys of
  // the tile and all rows of the block have the same segment.
  __device__ __forceinline__ KeyTileNote(int32_t next, bool one_segment, bool next_one_segment)
      : packed(next * 4 + (one_segment ? 2 : 0) + (next_one_segment ? 1 : 0)) {}
  __device__ __forceinline__ int32_t next() const { return packed >> 2; }
  __device__ __forceinline__ bool one_segment() const { return (packed & 2) != 0; }
  __device__ __forceinline__ bool next_one_segment() const { return (packed & 1) != 0; }
};

}  // namespace jax_flash::sm90
