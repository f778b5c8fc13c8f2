// Multiplies float8 operands (e4m3) in the decoding kernel: sm_89 and later. Q K^T has products of
// FP8. P stays in float16, and V is converted to it, which is exact:
//
//   x = (scale of Q) (scale of K) q.k, with the stored numbers
//   O = O 2^(m_old - m) + sum of float16(P s / u) V, out = u O / l
//
// s is the scale of a tile's V, and u the greatest |s| of the warp's tiles so far. If s / u is
// small, O and P are multiplied by a power of two for the time of the product (lift_of()).
//
// A tile holds pairs of columns as elements of 16 bits, so that ldmatrix can transpose it. A block
// of 8 pairs then gives two blocks of 8 columns: the even ones and the odd ones.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"
#include "plan/float8.h"
#include "ptx/float8.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "sm80/products.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

struct Float8Forward : Forward {
  Scales scales;
};

// Holds the scales that a thread needs: of its two rows, and of the tiles of the key/value head.
struct Float8Scales {
  const Scales& scales;
  const float *key, *value;
  float query[2];

  __device__ __forceinline__ Float8Scales(const Float8Forward& params, const BatchIndex& batch,
                                          int32_t kv_head, const int32_t (&heads)[2],
                                          const int32_t (&queries)[2])
      : scales(params.scales),
        key(batch.pointer<const float>(scales.key, kv_head)),
        value(batch.pointer<const float>(scales.value, kv_head)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t block = min(queries[half], params.shape.q_len - 1) / kScaleBlock;
      query[half] = batch.pointer<const float>(scales.query, heads[half])[block * scales.query.row];
    }
  }
  __device__ __forceinline__ float key_of(int32_t block) const {
    return key[block * scales.key.row];
  }
  __device__ __forceinline__ float value_of(int32_t block) const {
    return value[block * scales.value.row];
  }
};

// acc = A B^T, for the first 16 rows of A and all rows of B.
template <int kN, typename TileA, typename TileB>
__device__ __forceinline__ void multiply_float8_by_transpose(float (&acc)[1][kN][4],
                                                             const TileA& a_tile,
                                                             const TileB& b_tile) {
  set_zero(acc);
  const BlockReader a_reader(a_tile, BlockOrder::kRowsFirst, 0, 0);
  const BlockReader b_reader(b_tile, BlockOrder::kColsFirst, 0, 0);
#pragma unroll
  for (int k = 0; k < TileA::kCols / 16; ++k) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(a, a_reader.at(0, k * 2));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      ptx::ldmatrix_x4(b, b_reader.at(n * 8, k * 2));
      ptx::mma_m16n8k32_e4m3(acc[0][n], a, b[0], b[1]);
      ptx::mma_m16n8k32_e4m3(acc[0][n + 1], a, b[2], b[3]);
    }
  }
}

// acc += P V, with P in float16. acc[0][2 i] and acc[0][2 i + 1] are the even and the odd columns
// of columns 16 i to 16 i + 15. Rows of V are cleared as in add_kept_product().
template <int kN, int kOutN, typename Tile>
__device__ __forceinline__ void add_float8_product(float (&acc)[1][kOutN][4],
                                                   const float (&probabilities)[1][kN][4],
                                                   const Tile& value_tile, uint32_t kept) {
  const BlockReader reader(value_tile, BlockOrder::kRowsFirst, 0, 0);
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&block)[4] = probabilities[0][2 * k + i / 2];
      a[i] = ptx::cvt_rn_x2<__half>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int chunk = 0; chunk < kOutN / 2; chunk += 2) {
      uint32_t b[4], even[4], odd[4];
      ptx::ldmatrix_x4_trans(b, reader.at(k * 16, chunk));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The bytes are columns 2 g and 2 g + 1 of one key, then of the next one.
        const uint32_t word = keep_halves(b[i], kept >> (4 * k + i % 2 * 2));
        ptx::cvt_f16x2_e4m3x4(__byte_perm(word, 0, 0x3120), even[i], odd[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_m16n8k16<__half>(acc[0][2 * (chunk + i)], a, even[2 * i], even[2 * i + 1]);
        ptx::mma_m16n8k16<__half>(acc[0][2 * (chunk + i) + 1], a, odd[2 * i], odd[2 * i + 1]);
      }
    }
  }
}

template <int kOutN>
__device__ __forceinline__ void multiply_out(float (&out)[1][kOutN][4], float factor) {
#pragma unroll
  for (int n = 0; n < kOutN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[0][n][e] *= factor;
  }
}

// Returns s / u for a tile of values whose scale is `scale`: raises u, the unit of `out`, if need
// be.
template <int kOutN>
__device__ __forceinline__ float raise_unit(float scale, float& unit, float (&out)[1][kOutN][4]) {
  if (fabsf(scale) > unit) {
    multiply_out(out, unit / fabsf(scale));
    unit = fabsf(scale);
  }
  return scale == 0.0f ? 0.0f : scale / unit;
}

// Returns the power of two that lifts P s / u in float16, where it would lose digits below 2^-14,
// while a tile with a small s / u, `share`, is multiplied. `out`, below 2^9 kv_len, must not
// overflow.
__device__ __forceinline__ float lift_of(float share) {
  if (fabsf(share) >= 0x1p-8f) return 1.0f;
  const float inverse = __int_as_float(0x7f000000 - (__float_as_int(share) & 0x7f800000));
  return fminf(inverse, 0x1p86f);
}

}  // namespace jax_flash::sm80
