// Converts products of query and key to logits. LogitModifiers applies all modifiers that a call
// has to rows of fragments, which may belong to different heads:
//
//   logit = cap tanh((scale q.k + bias + distance terms) / cap), or -inf if the pair is not allowed
//
// modifiers/scores.cuh does the same for a whole tile of one head.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/bias.cuh"
#include "modifiers/distance.cuh"
#include "modifiers/dropout.cuh"
#include "modifiers/soft_cap.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Holds a row's elements of bias and mask unconverted, since a conversion would wait for the load.
template <int kN>
struct RowElements {
  uint32_t bias[kN][2], mask[kN][2];
};
struct NoElements {};

// Holds the modifiers of one batch and query head.
struct LogitModifiers {
  const Forward& params;
  int64_t bias0 = 0;  // index of element [0, 0] of this batch and head
  const uint8_t* mask = nullptr;
  const int32_t *query_ids = nullptr, *key_ids = nullptr;
  DistanceBias distance;
  Dropout dropout;

  // `present`: false if the object is not used.
  __device__ __forceinline__ LogitModifiers(const Forward& forward, const BatchIndex& batch,
                                            int32_t head, bool present = true)
      : params(forward) {
    if (!present) return;
    if (params.bias) bias0 = batch.offset(params.bias) + head * params.bias.head;
    distance = DistanceBias(params, batch, head);
    if (params.mask) mask = batch.pointer<const uint8_t>(params.mask, head);
    if (params.query_segment_ids) {
      query_ids = batch.pointer<const int32_t>(params.query_segment_ids);
      key_ids = batch.pointer<const int32_t>(params.key_value_segment_ids);
    }
    dropout = Dropout(params, batch, head);
  }

  // Turns products into logits, -inf where not allowed; units: in_natural_units().
  template <int kM, int kN>
  __device__ __forceinline__ void apply(float (&products)[kM][kN][4], const Band& band,
                                        int32_t row0, int32_t col0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        apply_row(products[m], half, band, row0 + fragment_row(m, 2 * half), col0);
      }
    }
  }
  // Loads the bias and the mask of a row's columns that the thread holds.
  template <int kN>
  __device__ __forceinline__ void load_row(RowElements<kN>& elements, int32_t row,
                                           int32_t col0) const {
    const int32_t last_col = params.shape.kv_len - 1, near_row = min(row, params.shape.q_len - 1);
    const auto load = [&](uint32_t (&words)[kN][2], const auto* data, int64_t stride) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          words[n][e] = data[min(col0 + fragment_col(n, e), last_col) * stride];
        }
      }
    };
    if (params.bias) {
      const int64_t index = bias0 + near_row * params.bias.row;
      if (params.bias.dtype == DType::kFloat32) {
        load(elements.bias, static_cast<const uint32_t*>(params.bias.data) + index,
             params.bias.col);
      } else {
        load(elements.bias, static_cast<const uint16_t*>(params.bias.data) + index,
             params.bias.col);
      }
    }
    if (mask) load(elements.mask, mask + near_row * params.mask.row, params.mask.col);
  }

  // Does the same as apply() for the thread's row number `half` of 16, which is row `row` of the
  // head. Elements are loaded together, one modifier at a time, unless load_row() has done so.
  template <int kN, typename Elements = NoElements>
  __device__ __forceinline__ void apply_row(float (&products)[kN][4], int half, const Band& band,
                                            int32_t row, int32_t col0,
                                            const Elements& elements = {}) const {
    constexpr bool kLoaded = !std::is_same_v<Elements, NoElements>;
    const bool valid = row < band.q_len;
    const int32_t first = valid ? band.first_col(row) : 0;
    const int32_t end = valid ? band.end_col(row) : 0;
    // Elements past the end are loaded from the last row or column, and not used.
    const int32_t last_col = params.shape.kv_len - 1, near_row = min(row, params.shape.q_len - 1);
    const auto for_each = [&](auto body) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) body(products[n][2 * half + e], col0 + fragment_col(n, e));
      }
    };
    const auto for_each_loaded = [&](const auto& words, auto body) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) body(products[n][2 * half + e], words[n][e]);
      }
    };
    const float scale = params.options.scale, cap = params.options.logits_soft_cap;
    if (params.bias) {
      if constexpr (kLoaded) {
        with_bias_words(params.bias.dtype, [&](auto float_of) {
          for_each_loaded(elements.bias, [&](float& value, uint32_t word) {
            value = fmaf(value, scale, float_of(word));
          });
        });
      } else {
        with_bias(params.bias, bias0 + near_row * params.bias.row, [&](const auto* data) {
          for_each([&](float& value, int32_t col) {
            value = fmaf(value, scale, to_float(data[min(col, last_col) * params.bias.col]));
          });
        });
      }
    } else {
      for_each([&](float& value, int32_t) { value *= scale; });
    }
    if (distance.present) {
      for_each([&](float& value, int32_t col) { value += distance.at(row, col); });
    }
    if (cap > 0.0f) {
      for_each([&](float& value, int32_t) {
        if (value != minus_infinity()) value = cap * tanh_accurate(value / cap);
      });
    }
    if (!in_natural_units(params)) for_each([&](float& value, int32_t) { value *= kLog2E; });
    if constexpr (kLoaded) {
      if (mask) {
        for_each_loaded(elements.mask, [](float& value, uint32_t byte) {
          if (byte == 0) value = minus_infinity();
        });
      }
    } else if (mask) {
      const uint8_t* mask_row = mask + near_row * params.mask.row;
      for_each([&](float& value, int32_t col) {
        if (mask_row[min(col, last_col) * params.mask.col] == 0) value = minus_infinity();
      });
    }
    if (query_ids) {
      const int32_t query_id = query_ids[near_row * params.query_segment_ids.row];
      for_each([&](float& value, int32_t col) {
        if (key_ids[min(col, last_col) * params.key_value_segment_ids.row] != query_id) {
          value = minus_infinity();
        }
      });
    }
    for_each([&](float& value, int32_t col) {
      if (col < first || col >= end) value = minus_infinity();
    });
  }

  // Scales products to log2 units and applies the band, for a call without modifiers.
  template <int kN>
  static __device__ __forceinline__ void apply_band(float (&products)[kN][4], int half,
                                                    const Band& band, int32_t row, int32_t col0,
                                                    float scale) {
    const bool valid = row < band.q_len;
    const int32_t first = valid ? band.first_col(row) : 0;
    const int32_t end = valid ? band.end_col(row) : 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& value = products[n][2 * half + e];
        const int32_t col = col0 + fragment_col(n, e);
        value = col < first || col >= end ? minus_infinity() : value * scale * kLog2E;
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

  // Returns the elements that dropout keeps: see Dropout.
  template <int kN, bool kTransposed = false>
  __device__ __forceinline__ Kept kept(int32_t row0, int32_t col0) const {
    return dropout.kept<kN, kTransposed>(params.options.dropout_threshold, row0, col0);
  }
};

}  // namespace jax_flash
