// What the sm_90 forward kernels for a single modifier do with it: soft cap, mask, segments, bias.
// The kernel for all of them uses modify_scores() of tile/modifiers.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/math.cuh"
#include "tile/band.cuh"
#include "tile/matmul.cuh"
#include "tile/modifiers.cuh"
#include "tile/pairs.cuh"
#include "tile/tensor_map.h"

namespace jax_flash::sm90 {

// The soft cap of a product s as s P(s^2), by scale and cap in the coefficients: no more terms than
// the greatest product of a warp needs.
struct SoftCapPlan {
  // Ratios of logit and cap, at most, and errors of logits, at most: as relative errors of
  // probabilities, of which a bfloat16 one has up to 2e-3, a float16 one, with three terms only, up
  // to 2.4e-4.
  static constexpr double kRange2 = 0.23, kRange3 = 0.35, kError2 = 3.5e-4, kError3 = 5e-5;
  float factor2[2] = {}, factor3[3] = {};  // to logits in log2 units
  float limit2 = -1.0f, limit3 = -1.0f;    // of |s|
  // Polynomials are in s^2 and an offset. Up to the limit their sum has the offset's exponent, and
  // beyond it a greater one, so a bit that the offset's exponent lacks, which `or` keeps.
  float offset2 = 0.0f, offset3 = 0.0f;

  SoftCapPlan() = default;
  SoftCapPlan(const Options& options, DType operands) {
    const double cap = options.logits_soft_cap, ratio = options.scale / cap;
    // Else powers of the ratio or of s leave the range of float32.
    if (!(ratio > 0x1p-14 && ratio < 0x1p14)) return;
    const auto set = [&](double range, float* factor, int terms, float& limit, float& offset) {
      limit = static_cast<float>(range / ratio);
      const float square = limit * limit;
      offset = std::exp2(std::ceil(std::log2(square)) + 1.0f) - square;
      // tanh(x) / x by Chebyshev interpolation in u = x^2, in Newton's form.
      double u[3], tanh_ratio[3];
      for (int i = 0; i < terms; ++i) {
        u[i] = range * range / 2 * (1 - std::cos((i + 0.5) / terms * 3.14159265358979323846));
        tanh_ratio[i] = std::tanh(std::sqrt(u[i])) / std::sqrt(u[i]);
      }
      const auto slope = [&](int i) {
        return (tanh_ratio[i + 1] - tanh_ratio[i]) / (u[i + 1] - u[i]);
      };
      const double second = terms == 3 ? (slope(1) - slope(0)) / (u[2] - u[0]) : 0.0;
      // Of u = ratio^2 (sum - offset), in powers of the sum.
      const double unit = options.scale * 1.4426950408889634, step = ratio * ratio;
      const double first = slope(0) - second * (u[0] + u[1]), origin = -step * offset;
      factor[0] = static_cast<float>(unit * (tanh_ratio[0] + slope(0) * (origin - u[0]) +
                                             second * (origin - u[0]) * (origin - u[1])));
      factor[1] = static_cast<float>(unit * step * (first + 2 * second * origin));
      if (terms == 3) factor[2] = static_cast<float>(unit * step * step * second);
    };
    // The interpolations' greatest errors are cap x^5 / 60 and cap x^7 / 640.
    if (operands == DType::kBFloat16) {
      set(std::fmin(kRange2, std::pow(60 * kError2 / cap, 1.0 / 5)), factor2, 2, limit2, offset2);
    }
    set(std::fmin(kRange3, std::pow(640 * kError3 / cap, 1.0 / 7)), factor3, 3, limit3, offset3);
  }
};

// Exponentials of a block of products under the soft cap, relative to shift[] of the rows, which it
// adds to sum[]. `seen`: the bits of all squares and offsets so far, also of NaN.
template <int kTerms>
__device__ __forceinline__ void soft_cap_exponentials(float (&block)[4],
                                                      const float (&factor)[kTerms], float offset,
                                                      const float (&shift)[2], float (&sum)[2],
                                                      uint32_t& seen) {
  float square[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    square[e] = fmaf(block[e], block[e], offset);
    float polynomial = factor[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) polynomial = fmaf(polynomial, square[e], factor[i]);
    block[e] = ptx::ex2_approx_ftz(fmaf(block[e], polynomial, -shift[e / 2]));
    sum[e / 2] += block[e];
  }
#pragma unroll
  for (int e = 0; e < 4; e += 2) {  // two in one instruction
    seen |= __float_as_uint(square[e]) | __float_as_uint(square[e + 1]);
  }
}
// Whether some square was beyond the limit.
__device__ __forceinline__ bool exceeds(uint32_t seen, float offset) {
  return (seen & ~__float_as_uint(offset) & 0x7f800000) != 0;
}

// The greatest magnitude in a warp's tile, NaN aside.
template <int kN>
__device__ __forceinline__ float greatest_magnitude(const float (&scores)[1][kN][4]) {
  constexpr int kChains = 4;
  float chain[kChains] = {};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) chain[e] = fmaxf(chain[e], fabsf(scores[0][n][e]));
  }
  const float value = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
  // Not negative, so that the order of the bits is theirs; the result is in a uniform register.
  return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
}

// Whether rows of an operand can be read in vectors of `bytes`.
inline bool has_vectors(const Operand& operand, int element_bytes, int bytes) {
  const auto fits = [&](int64_t elements) { return elements * element_bytes % bytes == 0; };
  bool all = operand.col == 1 && fits(operand.row) && fits(operand.head) &&
             reinterpret_cast<uintptr_t>(operand.data) % bytes == 0;
  for (const int64_t stride : operand.batch) all = all && fits(stride);
  return all;
}

// Elements that a thread's rows may attend to: of row `half`, bit 2 n + e is column
// fragment_col(n, e).
struct AllowedBits {
  uint32_t row[2];
};
template <int kN>
inline constexpr uint32_t kAllBits = kN == 16 ? ~0u : (1u << 2 * kN) - 1;

// Those among columns below `end`, counted from the thread's first.
__device__ __forceinline__ uint32_t bits_below(int32_t end) {
  const int32_t count = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// Takes away what the band does not allow, and rows that do not exist.
__device__ __forceinline__ void forbid_edges(AllowedBits& allowed, const Band& band, int32_t row0,
                                             int32_t col0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half), base = col0 + fragment_col(0, 0);
    const uint32_t bits =
        bits_below(band.end_col(row) - base) & ~bits_below(band.first_col(row) - base);
    allowed.row[half] &= row < band.q_len ? bits : 0;
  }
}

// A bit per column of this thread: whether its warp attends to it.
template <int kN>
__device__ __forceinline__ uint32_t attended_by_warp(const AllowedBits& allowed) {
  uint32_t bits = allowed.row[0] | allowed.row[1];
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  return bits;
}

// Of kBlocks blocks from n on, a row's bits one after the other: R2P makes predicates of them.
template <int kBlocks, int kN>
__device__ __forceinline__ void forbid(float (&scores)[kN][4], const AllowedBits& allowed, int n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      if (n + i / 2 >= kN) continue;
      float& score = scores[n + i / 2][2 * half + i % 2];
      if (!(allowed.row[half] >> (2 * n + i) & 1)) score = minus_infinity();
    }
  }
}

// A thread's part of a tile of the mask on its way to bits: of its two rows the eight columns of
// every fourth block, a byte each. A quad holds its rows, and exchanges bits.
template <int kN>
struct MaskBytes {
  static constexpr int kVectors = (kN + 3) / 4;
  uint2 bytes[2][kVectors] = {};

  // Where this thread's rows begin. `mask` is at row 0 and column 0 of the batch and head. Rows
  // beyond the last are the last.
  struct Rows {
    const uint8_t* first[2];
  };
  static __device__ __forceinline__ Rows rows(const uint8_t* mask, int64_t row_stride, int32_t row0,
                                              int32_t count) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(row0 + fragment_row(0, 2 * half), count - 1);
      rows.first[half] = mask + row * row_stride + threadIdx.x % 4 * 8;
    }
    return rows;
  }
  // Columns from `cols`, a multiple of 8, on are not read: their bytes stay what they were.
  __device__ __forceinline__ void load(const Rows& rows, int32_t col0, int32_t cols) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int n = 4 * i + threadIdx.x % 4;
        if ((4 * i + 3 < kN || n < kN) && col0 + n * 8 < cols) {
          bytes[half][i] = *reinterpret_cast<const uint2*>(rows.first[half] + col0 + i * 32);
        }
      }
    }
  }

  // Bytes are 0 or 1.
  __device__ __forceinline__ AllowedBits bits() const {
    AllowedBits allowed;
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    // Swaps the bits of the quad's lanes: a transposition of 4x4 pairs in each byte.
    const auto exchange = [](uint32_t word, int distance, int shift, uint32_t kept) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, word, distance);
      return (word & kept) | (__funnelshift_l(other, other, shift) & ~kept);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word = 0;
#pragma unroll
      for (int i = kVectors - 1; i >= 0; --i) {
        const uint2 vector = bytes[half][i];
        word = __dp4a(vector.x, 0x08040201u, __dp4a(vector.y, 0x80402010u, word << 8));
      }
      word = exchange(word, 1, odd ? 30 : 2, odd ? 0xcccccccc : 0x33333333);
      word = exchange(word, 2, upper ? 28 : 4, upper ? 0xf0f0f0f0 : 0x0f0f0f0f);
      allowed.row[half] = word;
    }
    return allowed;
  }
};

// The same for any layout, at once.
template <int kN>
__device__ __forceinline__ AllowedBits mask_bits(const Operand& mask, int64_t offset, int32_t row0,
                                                 int32_t col0, const Extent& extent) {
  const uint8_t* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = min(row0 + fragment_row(0, 2 * half), extent.rows - 1);
    rows[half] = static_cast<const uint8_t*>(mask.data) + offset + row * mask.row;
  }
  AllowedBits allowed = {};
#pragma unroll 4
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t col = min(col0 + fragment_col(n, e), extent.cols - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        allowed.row[half] |= (rows[half][col * mask.col] ? 1u : 0u) << (2 * n + e);
      }
    }
  }
  return allowed;
}

template <int kN>
__device__ __forceinline__ AllowedBits segment_bits(const Forward& params,
                                                    const ModifierOffsets& offsets, int32_t row0,
                                                    int32_t col0, const Extent& extent) {
  const Operand &queries = params.query_segment_ids, &keys = params.key_value_segment_ids;
  const auto* query_ids = static_cast<const int32_t*>(queries.data) + offsets.query_ids;
  const auto* key_ids = static_cast<const int32_t*>(keys.data) + offsets.key_ids;
  int32_t ids[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ids[half] = query_ids[min(row0 + fragment_row(0, 2 * half), extent.rows - 1) * queries.row];
  }
  AllowedBits allowed = {};
#pragma unroll 4
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int32_t id = key_ids[min(col0 + fragment_col(n, e), extent.cols - 1) * keys.row];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        allowed.row[half] |= (id == ids[half] ? 1u : 0u) << (2 * n + e);
      }
    }
  }
  return allowed;
}

// Whether `row` may attend to `col`, which is below kv_len.
template <uint32_t kModifiers>
__device__ __forceinline__ bool allows_element(const Forward& params,
                                               const ModifierOffsets& offsets, const Band& band,
                                               int32_t row, int32_t col) {
  if (row >= band.q_len || col < band.first_col(row) || col >= band.end_col(row)) return false;
  if constexpr (kModifiers == kMask) {
    return static_cast<const uint8_t*>(
               params.mask.data)[offsets.mask + row * params.mask.row + col * params.mask.col] != 0;
  } else {
    const Operand &queries = params.query_segment_ids, &keys = params.key_value_segment_ids;
    return static_cast<const int32_t*>(queries.data)[offsets.query_ids + row * queries.row] ==
           static_cast<const int32_t*>(keys.data)[offsets.key_ids + col * keys.row];
  }
}

// What the host derives for these kernels.
struct ModifierPlan {
  SoftCapPlan soft_cap;
  bool vectors = false;    // whether mask or bias can be read ahead: in vectors, or boxes
  int8_t batch_shift = 0;  // of QueryTileCursor

  ModifierPlan() = default;
  explicit ModifierPlan(const Forward& params) {
    if (params.options.logits_soft_cap > 0.0f) {
      soft_cap = SoftCapPlan(params.options, params.query.dtype);
    }
    if (params.mask) vectors = has_vectors(params.mask, 1, 8) && params.shape.kv_len % 8 == 0;
    if (params.bias) {
      const int bytes = params.bias.dtype == DType::kFloat32 ? 4 : 2;
      vectors = has_vectors(params.bias, bytes, 16) &&
                (bytes == 4 ? params.shape.kv_len % 4 == 0
                            : params.bias.dtype == params.query.dtype &&
                                  fits_tensor_map(params.shape, params.bias, 1));
    }
    // Up to four batches that share a bias or mask side by side: L2 then has to hold that many
    // heads' keys and values at a time.
    const Operand& shared = params.bias ? params.bias : params.mask;
    if (shared && shared.head != 0 && shared.batch[0] == 0 && shared.batch[1] == 0) {
      while (batch_shift < 2 && params.shape.batch % (int64_t{2} << batch_shift) == 0) {
        ++batch_shift;
      }
    }
  }
};

}  // namespace jax_flash::sm90
