// What the sm_90 forward kernels for a single modifier do with it: soft cap, mask, segments, bias.
// The kernel for all of them uses modify_scores() of tile/modifiers.cuh.
#pragma once

#include <bit>
#include <cstdint>

#include "params.h"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "tile/band.cuh"
#include "tile/matmul.cuh"
#include "tile/modifiers.cuh"
#include "tile/pairs.cuh"

namespace jax_flash::sm90 {

// The soft cap of a product s as s P(s^2), by scale and cap in the coefficients: no more terms than
// the greatest product of a warp needs.
struct SoftCapPlan {
  // tanh within 2e-8, relative to it within 4e-8, up to these ratios of logit and cap.
  static constexpr float kRange3 = 0.17f, kRange4 = 0.35f;
  float factor3[3] = {}, factor4[4] = {};  // to logits in log2 units
  float limit3 = -1.0f, limit4 = -1.0f;    // of |s|
  int32_t limit3_square = -1;              // the bits of a float

  SoftCapPlan() = default;
  explicit SoftCapPlan(const Options& options) {
    const double ratio = static_cast<double>(options.scale) / options.logits_soft_cap;
    // Else powers of the ratio or of s leave the range of float32.
    if (!(ratio > 0x1p-14 && ratio < 0x1p14)) return;
    // By Chebyshev interpolation in s^2.
    const double fit3[3] = {0.999999960, -0.333308402, 0.131024269};
    const double fit4[4] = {0.999999965, -0.333324202, 0.132957516, -0.048955637};
    double power = options.scale * 1.4426950408889634;
    for (int i = 0; i < 4; ++i) {
      if (i < 3) factor3[i] = static_cast<float>(power * fit3[i]);
      factor4[i] = static_cast<float>(power * fit4[i]);
      power *= ratio * ratio;
    }
    limit3 = static_cast<float>(kRange3 / ratio);
    limit4 = static_cast<float>(kRange4 / ratio);
    limit3_square = std::bit_cast<int32_t>(limit3 * limit3);
  }
};

// Exponentials of a block of products under the soft cap, relative to shift[] of the rows, which it
// adds to sum[]. `greatest_square`: the bits of the greatest square so far, also of NaN.
template <int kTerms>
__device__ __forceinline__ void soft_cap_exponentials(float (&block)[4],
                                                      const float (&factor)[kTerms],
                                                      const float (&shift)[2], float (&sum)[2],
                                                      int32_t& greatest_square) {
  float square[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    square[e] = block[e] * block[e];
    float polynomial = factor[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) polynomial = fmaf(polynomial, square[e], factor[i]);
    block[e] = ptx::ex2_approx_ftz(fmaf(block[e], polynomial, -shift[e / 2]));
    sum[e / 2] += block[e];
  }
  // Not negative, so that integers are in the same order; two a time.
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    greatest_square =
        __vimax3_s32(__float_as_int(square[e]), __float_as_int(square[e + 1]), greatest_square);
  }
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

__device__ __forceinline__ void forbid(float (&block)[4], const AllowedBits& allowed, int n) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (!(allowed.row[e / 2] >> (2 * n + e % 2) & 1)) block[e] = minus_infinity();
  }
}

// A thread's part of a tile of the mask on its way to bits: of its two rows the eight columns of
// every fourth block, a byte each. A quad holds its rows, and exchanges bits.
template <int kN>
struct MaskBytes {
  static constexpr int kVectors = (kN + 3) / 4;
  uint2 bytes[2][kVectors];

  // `mask` is at row 0 and column 0 of the batch and head. Rows beyond the last are the last;
  // columns from `cols`, a multiple of 8, on are not read.
  __device__ __forceinline__ void load(const uint8_t* mask, int64_t row_stride, int32_t row0,
                                       int32_t rows, int32_t col0, int32_t cols) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(row0 + fragment_row(0, 2 * half), rows - 1);
      const uint8_t* first = mask + row * row_stride + col0 + threadIdx.x % 4 * 8;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        bytes[half][i] = uint2{};
        const int n = 4 * i + threadIdx.x % 4;
        if ((4 * i + 3 < kN || n < kN) && col0 + n * 8 < cols) {
          bytes[half][i] = *reinterpret_cast<const uint2*>(first + i * 32);
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
      for (int i = 0; i < kVectors; ++i) {
        const uint2 vector = bytes[half][i];
        word |= __dp4a(vector.x, 0x08040201u, __dp4a(vector.y, 0x80402010u, 0u)) << 8 * i;
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

// A warp's 16 rows of a tile of the bias in shared memory, which it copies itself, in groups of 32
// columns. Of 4-byte elements, the 32 bytes under a block of a fragment are at place n ^ row % 4 of
// a row of a group; of 2-byte elements the 16 bytes are at n ^ row / 2 % 4: no bank conflicts.
template <int kN>
struct BiasTile {
  static constexpr int kWarpBytes = 16 * kN * 8 * 4;
  uint32_t smem;  // of this warp

  // Where a thread's vectors of a tile's rows begin, in vectors of 16 bytes: for once a query tile.
  // Rows beyond the last are the last.
  struct Rows {
    uint32_t at[4];
  };
  template <int kElementBytes>
  static __device__ __forceinline__ Rows rows(int64_t row_stride, int32_t row0, int32_t count) {
    constexpr int kLanes = kElementBytes * 2;  // of a row of a group
    const int lane = threadIdx.x % 32;
    Rows rows = {};
#pragma unroll
    for (int i = 0; i < 16 * kLanes / 32; ++i) {
      const int64_t row = min(row0 + lane / kLanes + i * (32 / kLanes), count - 1);
      rows.at[i] = static_cast<uint32_t>(row * row_stride * kElementBytes / 16) + lane % kLanes;
    }
    return rows;
  }

  // Starts copies. `bias` is at row 0 of the batch and head, and the tile's first column, with
  // `cols` behind it. What was there has been read.
  template <int kElementBytes>
  __device__ __forceinline__ void copy(const uint8_t* bias, const Rows& rows, int32_t cols) const {
    constexpr int kLanes = kElementBytes * 2;
    const int lane = threadIdx.x % 32, row = lane / kLanes, chunk = lane % kLanes;
    const int place =
        kElementBytes == 4 ? (chunk / 2 ^ row % 4) * 2 + chunk % 2 : (chunk ^ row / 2 % 4);
    const uint32_t to = smem + row * (kLanes * 16) + place * 16;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * kLanes / 32; ++i) {
      const uint8_t* from = bias + uint64_t{rows.at[i]} * 16;
#pragma unroll
      for (int group = 0; group < kN / 4; ++group) {
        const bool exists = group * 32 + chunk * (16 / kElementBytes) < cols;
        ptx::cp_async_16(to + group * (16 * kLanes * 16) + i * 512, from + group * kLanes * 16,
                         exists);
      }
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait_group<0>();
    __syncwarp();
  }

  // Adds the bias to a block of products times `scale`.
  template <typename T>
  __device__ __forceinline__ void add(float (&block)[4], float scale, int n) const {
    constexpr int kRowBytes = 32 * sizeof(T);
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const int place = (n ^ (sizeof(T) == 4 ? row : row / 2)) & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = smem + n / 4 * 16 * kRowBytes + (row + 8 * half) * kRowBytes +
                          place * (8 * sizeof(T)) + pair * (2 * sizeof(T));
      float first, second;
      if constexpr (sizeof(T) == 4) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(at));
      } else {
        uint32_t word;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
        first = to_float(reinterpret_cast<const T(&)[2]>(word)[0]);
        second = to_float(reinterpret_cast<const T(&)[2]>(word)[1]);
      }
      block[2 * half] = fmaf(block[2 * half], scale, first);
      block[2 * half + 1] = fmaf(block[2 * half + 1], scale, second);
    }
  }
};

// What the host derives for these kernels.
struct ModifierPlan {
  SoftCapPlan soft_cap;
  bool vectors = false;  // whether mask or bias can be read ahead, in vectors

  ModifierPlan() = default;
  explicit ModifierPlan(const Forward& params) {
    if (params.options.logits_soft_cap > 0.0f) soft_cap = SoftCapPlan(params.options);
    if (params.mask) vectors = has_vectors(params.mask, 1, 8) && params.shape.kv_len % 8 == 0;
    if (params.bias) {
      const int bytes = params.bias.dtype == DType::kFloat32 ? 4 : 2;
      vectors = has_vectors(params.bias, bytes, 16) && params.shape.kv_len * bytes % 16 == 0;
    }
  }
};

}  // namespace jax_flash::sm90
