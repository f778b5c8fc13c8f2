// Defines the parameters of the sm_80 family's decoding kernels, and names the units of a call
// (plan/decode_sm80.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/decode_sm80.h"
#include "plan/divisor.h"
#include "sm80/decode/float8.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/element.cuh"

namespace jax_flash::sm80 {

// The operands and results of a call; for float8, with scales.
template <typename Element>
using DecodeParams = std::conditional_t<kIsFloat8<Element>, Float8Forward, Forward>;

// Holds what a block computes its place and its band from, before its first copies. It is the
// kernels' first parameter, and contiguous: parameters and instructions come from memory, a line at
// a time, and the copies wait for them.
struct DecodeCall {
  DecodeParts parts;
  BatchAxes batch_axes;
  Band band;  // unless operands decide
  bool band_varies;
  bool by_key_lengths;  // true if these alone decide, without causal order or a window
  Operand key_lengths;
  bool modified;  // true if something besides the band changes logits
  bool loads;     // true if there is a bias or a mask

  DecodeCall(const Forward& params, const DecodeParts& its_parts)
      : parts(its_parts),
        batch_axes(params.shape),
        band(Window(params.options), params.shape.q_len, params.shape.kv_len, 0),
        band_varies(Band::varies(params)),
        by_key_lengths(params.key_value_seq_lengths && !params.query_seq_lengths &&
                       !params.window && !banded(params.options)),
        key_lengths(params.key_value_seq_lengths),
        modified(adds_to_logits(params) || params.mask || params.query_segment_ids ||
                 params.options.logits_soft_cap > 0.0f),
        loads(params.bias || params.mask) {}

  // Returns the band of a batch entry. If key lengths alone decide, this takes few instructions.
  __device__ __forceinline__ Band band_of(const Forward& params, int32_t batch,
                                          const BatchIndex& index) const {
    if (!band_varies) return band;
    if (!by_key_lengths) return find_band(params, batch);
    Band its = band;
    its.hi = its.kv_len = min(max(*index.pointer<const int32_t>(key_lengths), 0), band.kv_len);
    return its;
  }

 private:
  // A function of its own, so that other calls do not fetch its instructions.
  __device__ __noinline__ Band find_band(const Forward& params, int32_t batch) const {
    return Band(params, BatchIndex(batch_axes, batch));
  }
};

// Names a unit.
struct DecodeUnit {
  int32_t batch, kv_head;
  int32_t first_row, rows;  // counted in [queries, heads of the group]
  PlainDivisor group;

  __device__ __forceinline__ DecodeUnit(const Shape& shape, const DecodeParts& parts, int32_t unit)
      : group(parts.group) {
    const int32_t head = parts.chunks.quotient(unit);
    first_row = (unit - head * parts.chunks.divisor) * kDecodeRows;
    rows = min(kDecodeRows, group.divisor * shape.q_len - first_row);
    batch = parts.kv_heads.quotient(head);
    kv_head = head - batch * parts.kv_heads.divisor;
  }
  __device__ __forceinline__ int32_t query(int row) const {
    return group.quotient(first_row + row);
  }
  __device__ __forceinline__ int32_t head(int row) const {
    return kv_head * group.divisor + first_row + row - query(row) * group.divisor;
  }
};

}  // namespace jax_flash::sm80
