// Turns products of Hopper's kernels for float32 into logits, for calls with modifiers. This does
// what modifiers/scores.cuh and modifiers/scores_transposed.cuh do, but a warp loads elements of
// the bias while products run. Without a bias, it loads those of the mask instead: there are
// registers for one of the two.
#pragma once

#include <cstdint>

#include "modifiers/band.cuh"
#include "modifiers/bias.cuh"
#include "modifiers/distance.cuh"
#include "modifiers/mask.cuh"
#include "modifiers/pairs.cuh"
#include "modifiers/soft_cap.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Holds a batch entry's place in the bias and in the mask, and its coordinates.
struct Float32Places {
  BatchIndex batch;
  int64_t bias = 0, mask = 0;  // indices of the first elements

  Float32Places() = default;
  __device__ __forceinline__ Float32Places(const Forward& params, const BatchIndex& index)
      : batch(index) {
    if (params.bias) bias = index.offset(params.bias);
    if (params.mask) mask = index.offset(params.mask);
  }
};

// Computes the logits of a warp's fragments of S, or of S^T if kTransposed, whose first element
// belongs to query row0 and key col0 of a head. kModifiers: those that the call may have.
template <uint32_t kModifiers, int kN, bool kTransposed>
struct Float32Logits {
  static constexpr bool kMayCap = kModifiers & kSoftCap, kMayAdd = kModifiers & kDistance;

  const Forward& params;
  const Float32Places& places;
  const Band& band;

  int32_t head, row0, col0;
  uint32_t words[kN][4];  // of the bias, or else of the mask

  __device__ __forceinline__ Float32Logits(const Forward& forward, const Float32Places& of_batch,
                                           const Band& allowed)
      : params(forward), places(of_batch), band(allowed) {}

  // Moves to another tile, and starts loads.
  __device__ __forceinline__ void load(int32_t query_head, int32_t row, int32_t col) {
    head = query_head;
    row0 = row;
    col0 = col;
    if (params.bias) {
      if (params.bias.dtype == DType::kFloat32) {
        load_words<uint32_t>(params.bias, places.bias);
      } else {
        load_words<uint16_t>(params.bias, places.bias);
      }
    } else if (params.mask) {
      load_words<uint8_t>(params.mask, places.mask);
    }
  }

  // Turns products into logits, -inf where not allowed, in the units of in_natural_units().
  __device__ __forceinline__ void apply(float (&scores)[1][kN][4]) const {
    const Options& options = params.options;
    const bool adds = adds_to_logits(params), caps = kMayCap && options.logits_soft_cap > 0.0f;
    if (params.bias) {
      with_bias_words(params.bias.dtype, [&](auto float_of) {
        for_each(scores, [&](float& score, uint32_t word) {
          score = fmaf(score, options.scale, float_of(word));
        });
      });
    } else {
      const float factor = adds || caps ? options.scale : options.scale * kLog2E;
      for_each(scores, [&](float& score, uint32_t) { score *= factor; });
    }
    if (kMayAdd && (params.alibi_slopes || params.relative_bias)) add_distances(scores[0]);
    if constexpr (kMayCap) {
      if (caps && adds) keep_finite(scores, params);
      if (caps) soft_cap<true>(scores, options.logits_soft_cap);
      if (caps && !adds) for_each(scores, [](float& score, uint32_t) { score *= kLog2E; });
    }
    if (params.mask) forbid_masked(scores);
    apply_band(scores[0]);
  }

 private:
  template <typename Body>
  __device__ __forceinline__ void for_each(float (&scores)[1][kN][4], Body body) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(scores[0][n][e], words[n][e]);
    }
  }

  // Calls body(n, half, first, second) for the elements of an operand.
  template <typename Word, typename Body>
  __device__ __forceinline__ void for_elements(const Operand& operand, int64_t offset,
                                               Body body) const {
    const Word* data = static_cast<const Word*>(operand.data) + offset + head * operand.head;
    if constexpr (kTransposed) {
      for_pairs<Word, 2 * kN, kN>(data, operand.col, operand.row, col0, row0,
                                  {band.kv_len, band.q_len}, body);
    } else {
      for_pairs<Word, 2 * kN, kN>(data, operand.row, operand.col, row0, col0,
                                  {band.q_len, band.kv_len}, body);
    }
  }
  template <typename Word>
  __device__ __forceinline__ void load_words(const Operand& operand, int64_t offset) {
    for_elements<Word>(operand, offset, [&](int n, int half, Word first, Word second) {
      words[n][2 * half] = first;
      words[n][2 * half + 1] = second;
    });
  }

  __device__ __forceinline__ void add_distances(float (&scores)[kN][4]) const {
    const DistanceBias distance(params, places.batch, head);
    if constexpr (kTransposed) {
      distance.add_transposed(scores, 1.0f, col0, row0);
    } else {
      distance.add(scores, 1.0f, row0, col0);
    }
  }

  __device__ __forceinline__ void forbid_masked(float (&scores)[1][kN][4]) const {
    if (!params.bias) {
      return for_each(scores, [](float& score, uint32_t word) {
        if (word == 0) score = minus_infinity();
      });
    }
    for_elements<uint8_t>(params.mask, places.mask, [&](int n, int half, uint8_t a, uint8_t b) {
      forbid_pair(scores[0], n, half, a == 0, b == 0);
    });
  }

  // Sets elements outside of the band to -inf.
  __device__ __forceinline__ void apply_band(float (&scores)[kN][4]) const {
    constexpr int kRows = kTransposed ? 8 * kN : 16, kCols = kTransposed ? 16 : 8 * kN;
    if (row0 + kRows <= band.q_len && band.all_allowed(row0, row0 + kRows, col0, col0 + kCols)) {
      return;
    }
    if constexpr (kTransposed) {
      mask_band_transposed(scores, band, col0, row0);
    } else {
      mask_rows(scores);
    }
  }
  // Does the same for S, of which rows may not exist.
  __device__ __forceinline__ void mask_rows(float (&scores)[kN][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + fragment_row(0, 2 * half), base = col0 + fragment_col(0, 0);
      const int32_t first = band.first_col(row) - base;
      const int32_t end = row < band.q_len ? band.end_col(row) - base : INT32_MIN;
      forbid_outside(scores, half, first, end);
    }
  }
};

}  // namespace jax_flash::sm90
