// Converts products of query and key to logits, one by one, in accumulator fragments.
//   mask_band       what a plain call needs, and only in tiles at the edge of the band
//   LogitModifiers  what a general call needs everywhere: bias, soft cap, mask, segments, dropout
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "modifiers/philox.h"
#include "params.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Sets elements that the band does not allow to -inf. Row 0 of the fragments is row0 of the
// operand.
template <int kM, int kN>
__device__ __forceinline__ void mask_band(float (&logits)[kM][kN][4], const Band& band,
                                          int32_t row0, int32_t col0) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + fragment_row(m, 2 * half);
      const int32_t base = col0 + fragment_col(0, 0);
      const int32_t first = band.first_col(row) - base, end = band.end_col(row) - base;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int col = n * 8 + e;
          if (col < first || col >= end) logits[m][n][2 * half + e] = minus_infinity();
        }
      }
    }
  }
}

// Loads an element of an array whose type is known only at run time.
__device__ __forceinline__ float load_float(const Operand& operand, int64_t index) {
  switch (operand.dtype) {
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(operand.data)[index]);
    case DType::kFloat16: return __half2float(static_cast<const __half*>(operand.data)[index]);
    case DType::kFloat32: break;
  }
  return static_cast<const float*>(operand.data)[index];
}

// Returns whether logits are in natural units. In general calls they are if there is a bias;
// otherwise they are in log2 units. A bias may be any float32, even -3e38, whose product with
// log2(e) overflows or is rounded by far more than 1. So differences between logits, which are
// exact wherever they matter, are computed first, and the factor is applied to them.
__device__ __forceinline__ bool in_natural_units(const Forward& params) {
  return bool{params.bias};
}

// Beyond this magnitude, a row's lse lacks a part that gradients need; lse_low holds it. Up to this
// magnitude, that part is less than 2^-14, as is what the sm_90 kernels' log2 units add.
inline constexpr float kExtremeLse = 1024.0f;
__device__ __forceinline__ bool is_extreme(float lse) {
  return fabsf(lse) > kExtremeLse && fabsf(lse) != -minus_infinity();
}

// Some kernels take a logit below kLeastLogit for -inf, and take no special care of logits above
// kExtremeLse. They are right where a row's greatest logit is within these bounds and far from the
// lower one, and where all of its logits are -inf. A row's lse shows whether this holds: it is
// kLowLse where some finite logit was taken for -inf and no greater one followed.
inline constexpr float kLeastLogit = -1024.0f, kLowLse = -3.0e38f;
__device__ __forceinline__ bool needs_exact_logits(float lse) {
  const bool moderate = lse >= kLeastLogit + 256.0f && lse <= kExtremeLse;
  return !moderate && lse != minus_infinity();  // true for NaN, too
}

// Exact to within a few units in the last place: tanh.approx has errors of 2^-11, which are
// noticeable when multiplied by the cap.
__device__ __forceinline__ float tanh_accurate(float x) {
  // 1 - 2 / (exp(2 x) + 1) suffers from cancellation near 0, so the series (error below 2^-24) is
  // used there.
  const float far = 1.0f - __fdividef(2.0f, ptx::ex2_approx_ftz(x * (2.0f * kLog2E)) + 1.0f);
  const float square = x * x;
  const float series =
      fmaf(fmaf(fmaf(-17.0f / 315.0f, square, 2.0f / 15.0f), square, -1.0f / 3.0f), square, 1.0f);
  return fabsf(x) < 0.2f ? x * series : far;
}

// Returns d logit / d (logit before the soft cap) = 1 - (logit / cap)^2, computed from the
// element's probability and its row's lse, which has the units of logits. Keeping all logits would
// take too many registers.
__device__ __forceinline__ float soft_cap_slope(const Forward& params, float probability,
                                                float lse) {
  const float unit = in_natural_units(params) ? 1.0f : kLn2;
  const float logit = fmaf(lse, unit, __log2f(probability) * kLn2);
  const float inverse = 1.0f / params.options.logits_soft_cap;
  const float ratio = logit * inverse;
  return 1.0f - ratio * ratio;
}

// Changes the logits of one batch and query head.
struct LogitModifiers {
  const Forward& params;
  int64_t bias0 = 0;  // index of element [0, 0] of this batch and head
  const uint8_t* mask = nullptr;
  const int32_t *query_ids = nullptr, *key_ids = nullptr;
  uint32_t seed0 = 0, seed1 = 0, dropout_batch = 0, dropout_head = 0;
  uint32_t dropout_row = 0, dropout_col = 0;  // the indices that row 0 and column 0 count as

  __device__ __forceinline__ LogitModifiers(const Forward& forward, const BatchIndex& batch,
                                            int32_t head)
      : params(forward) {
    if (params.bias) bias0 = batch.offset(params.bias) + head * params.bias.head;
    if (params.mask) mask = batch.pointer<const uint8_t>(params.mask, head);
    if (params.query_segment_ids) {
      query_ids = batch.pointer<const int32_t>(params.query_segment_ids);
      key_ids = batch.pointer<const int32_t>(params.key_value_segment_ids);
    }
    if (params.options.dropout_threshold != 0) {
      const uint32_t* seed = batch.pointer<const uint32_t>(params.dropout_seed);
      seed0 = seed[0];
      seed1 = seed[params.dropout_seed.col];
      dropout_batch = *batch.pointer<const uint32_t>(params.dropout_batch_ids);
      dropout_head = *batch.pointer<const uint32_t>(params.dropout_head_ids, head);
      if (params.dropout_start) {
        const uint32_t* start = batch.pointer<const uint32_t>(params.dropout_start);
        dropout_row = start[0];
        dropout_col = start[params.dropout_start.col];
      }
    }
  }

  // Turns products into logits, -inf where not allowed; units: in_natural_units().
  template <int kM, int kN>
  __device__ __forceinline__ void apply(float (&products)[kM][kN][4], const Band& band,
                                        int32_t row0, int32_t col0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = row0 + fragment_row(m, 2 * half);
        const bool valid = row < band.q_len;
        const int32_t first = valid ? band.first_col(row) : 0;
        const int32_t end = valid ? band.end_col(row) : 0;
        const int32_t query_id =
            query_ids && valid ? query_ids[row * params.query_segment_ids.row] : 0;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int32_t col = col0 + fragment_col(n, e);
            // Loaded whether or not the row may attend to the key, which saves a branch.
            const int32_t key_id =
                key_ids && col < band.kv_len ? key_ids[col * params.key_value_segment_ids.row] : 0;
            bool allowed = col >= first && col < end && query_id == key_id;
            if (mask && allowed) {
              allowed = mask[row * params.mask.row + col * params.mask.col] != 0;
            }
            float& value = products[m][n][2 * half + e];
            value = allowed ? logit(value, row, col) : minus_infinity();
          }
        }
      }
    }
  }

  // Returns whether `row` may attend to `col`, which is below kv_len.
  __device__ __forceinline__ bool allows(const Band& band, int32_t row, int32_t col) const {
    return row < band.q_len && col >= band.first_col(row) && col < band.end_col(row) &&
           (!query_ids || query_ids[row * params.query_segment_ids.row] ==
                              key_ids[col * params.key_value_segment_ids.row]) &&
           (!mask || mask[row * params.mask.row + col * params.mask.col] != 0);
  }

  // Bit 2 n + e of the result is set if dropout keeps column fragment_col(n, e) of `row`. Called by
  // whole warps; col0 is a multiple of kDropoutGroup. One counter serves the eight columns of a
  // block, which four lanes hold: each lane draws for one of kShared blocks, and the lanes exchange
  // words.
  template <int kN>
  __device__ __forceinline__ uint32_t kept(int32_t row, int32_t col0) const {
    constexpr int kShared = kN % 4 == 0 ? 4 : 2;
    static_assert(kN % kShared == 0 && kN <= 16 && kDropoutGroup == 8);
    const int lane = threadIdx.x % 4;
    uint32_t bits = 0;
#pragma unroll
    for (int n0 = 0; n0 < kN; n0 += kShared) {
      const int mine = n0 + lane % kShared;
      const PhiloxWords words =
          dropout_words(seed0, seed1, dropout_batch, dropout_head, dropout_row + row,
                        dropout_col + col0 + mine * kDropoutGroup);
#pragma unroll
      for (int distance = 0; distance < kShared; ++distance) {
        const int wanted = lane ^ distance;  // the partner's lane, and the word that it needs
        const uint32_t low = wanted & 1 ? words.word[1] : words.word[0];
        const uint32_t high = wanted & 1 ? words.word[3] : words.word[2];
        const uint32_t pair = __shfl_xor_sync(0xffffffff, wanted & 2 ? high : low, distance);
        const uint32_t threshold = params.options.dropout_threshold;
        const uint32_t keep =
            ((pair & 0xffff) >= threshold ? 1 : 0) | (pair >> 16 >= threshold ? 2 : 0);
        bits |= keep << 2 * (n0 + (wanted % kShared));
      }
    }
    return bits;
  }

  // Returns the logit of an allowed element, given its product; units: in_natural_units().
  __device__ __forceinline__ float logit(float product, int32_t row, int32_t col) const {
    const Options& options = params.options;
    float logit = product * options.scale;
    if (params.bias) {
      const float bias =
          load_float(params.bias, bias0 + row * params.bias.row + col * params.bias.col);
      logit = fmaf(product, options.scale, bias);
    }
    // A bias of -inf forbids the element; the soft cap would turn it into a logit of -cap.
    if (options.logits_soft_cap > 0.0f && logit != minus_infinity()) {
      logit = options.logits_soft_cap * tanh_accurate(logit / options.logits_soft_cap);
    }
    return in_natural_units(params) ? logit : logit * kLog2E;
  }
};

}  // namespace jax_flash
