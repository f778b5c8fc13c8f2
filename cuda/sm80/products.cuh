// Multiplies tiles in shared memory, and stores accumulators to shared memory as operands. The
// kernels of the sm_80 family share these functions.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tf32.cuh"
#include "tile/element.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

// acc = A B^T, for rows of A from `row` on and rows of B from `col` on. kFlags: ProductFlags.
template <typename Element, uint32_t kFlags = kRoundedB | kRolled, int kM, int kN, typename TileA,
          typename TileB>
__device__ __forceinline__ void multiply_by_transpose(float (&acc)[kM][kN][4], const TileA& a_tile,
                                                      int row, const TileB& b_tile, int col) {
  set_zero(acc);
  const BlockReader a_reader(a_tile, BlockOrder::kRowsFirst, row, 0);
  const BlockReader b_reader(b_tile, BlockOrder::kColsFirst, col, 0);
  matmul<Element, TileA::kCols / kStepCols<Element>, kFlags>(
      acc, [&](uint32_t (&a)[4], int m, int k) { ptx::ldmatrix_x4(a, a_reader.at(m * 16, k * 2)); },
      [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, b_reader.at(n * 8, k * 2)); });
}

// acc = A B^T, like multiply_by_transpose(), summed over the first `cols` columns, rounded up to
// 128: the others are zeros. With kShares == 2, sums over half number `share` of each 128 columns.
// Fragments are loaded two steps ahead.
template <typename Element, int kShares = 1, int kM, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void multiply_first_columns(float (&acc)[kM][kN][4], const TileA& a_tile,
                                                       int row, const TileB& b_tile, int col,
                                                       int32_t cols, int share = 0) {
  constexpr int kCols = 128, kPanels = kCols / TileA::kPanelCols;  // per iteration of the loop
  constexpr int kSteps = kCols / kShares / kStepCols<Element>, kSlots = 4, kAhead = 2;
  static_assert(TileA::kCols == TileB::kCols && TileA::kCols % kCols == 0);
  static_assert(kPanels % kShares == 0 && kSteps % kSlots == 0);
  set_zero(acc);
  BlockReader a_reader(a_tile, BlockOrder::kRowsFirst, row, 0);
  BlockReader b_reader(b_tile, BlockOrder::kColsFirst, col, 0);
  a_reader.offset += share * (kPanels / kShares * TileA::kPanelBytes);
  b_reader.offset += share * (kPanels / kShares * TileB::kPanelBytes);
  uint32_t a[kSlots][kM][4], b[kSlots][kN / 2][4];
  const auto load = [&](int k) {
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[k % kSlots][m], a_reader.at(m * 16, k * 2));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      ptx::ldmatrix_x4(b[k % kSlots][n / 2], b_reader.at(n * 8, k * 2));
    }
  };
#pragma unroll
  for (int k = 0; k < kAhead; ++k) load(k);
#pragma unroll 1
  for (int32_t first = 0; first < cols; first += kCols) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      // Fragments of the next iteration; in the last one, the same again, which are not used.
      if (k + kAhead == kSteps && first + kCols < cols) {
        a_reader.offset += kPanels * TileA::kPanelBytes;
        b_reader.offset += kPanels * TileB::kPanelBytes;
      }
      load((k + kAhead) % kSteps);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const uint32_t (&fragment)[4] = b[k % kSlots][n / 2];
          ptx::mma_m16n8k16<Element>(acc[m][n], a[k % kSlots][m], fragment[n % 2 * 2],
                                     fragment[n % 2 * 2 + 1]);
        }
      }
    }
  }
}

// acc += A^T B, for columns of A from `row` on. The warps take 16 columns of B at a time, in turn.
template <typename Element, int kWarpCols, int kM, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void add_transpose_product(float (&acc)[kM][kN][4], const TileA& a_tile,
                                                      int row, const TileB& b_tile, int warp_col) {
  if constexpr (kIsFloat32<Element>) {
    const TransposedReader b_reader(b_tile, 0, warp_col * 4);
    const TransposedReader a_reader(a_tile, 0, row / 4);
    matmul<Element, TileA::kRows / 8, kRoundedA | kRolled>(
        acc, [&](uint32_t (&a)[4], int m, int k) { a_reader.read(a, k * 8, m * 4); },
        [&](uint32_t (&b)[4], int n, int k) { b_reader.read_b(b, k * 8, n * 2 * kWarpCols); });
  } else {
    const BlockReader b_reader(b_tile, BlockOrder::kRowsFirst, 0, warp_col * 2);
    const BlockReader a_reader(a_tile, BlockOrder::kColsFirst, 0, row / kChunk);
    matmul<Element, TileA::kRows / 16>(
        acc,
        [&](uint32_t (&a)[4], int m, int k) {
          ptx::ldmatrix_x4_trans(a, a_reader.at(k * 16, m * 2));
        },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(b, b_reader.at(k * 16, n * kWarpCols));
        });
  }
}

// acc = A B, for rows of A from `row` on. The warps take 16 columns of B at a time, in turn.
template <typename Element, int kWarpCols, int kM, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void multiply(float (&acc)[kM][kN][4], const TileA& a_tile, int row,
                                         const TileB& b_tile, int warp_col) {
  const BlockReader a_reader(a_tile, BlockOrder::kRowsFirst, row, 0);
  if constexpr (kIsFloat32<Element>) {
    const TransposedReader b_reader(b_tile, 0, warp_col * 4);
    set_zero(acc);
    matmul<Element, TileB::kRows / 8, kRoundedA | kRoundedB | kRolled>(
        acc,
        [&](uint32_t (&a)[4], int m, int k) { ptx::ldmatrix_x4(a, a_reader.at(m * 16, k * 2)); },
        [&](uint32_t (&b)[4], int n, int k) { b_reader.read_b(b, k * 8, n * 2 * kWarpCols); });
  } else {
    const BlockReader b_reader(b_tile, BlockOrder::kRowsFirst, 0, warp_col * 2);
    set_zero(acc);
    matmul<Element, TileB::kRows / 16>(
        acc,
        [&](uint32_t (&a)[4], int m, int k) { ptx::ldmatrix_x4(a, a_reader.at(m * 16, k * 2)); },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(b, b_reader.at(k * 16, n * kWarpCols));
        });
  }
}

// Passes accumulator fragments as float32 to the same lane of another warp: stores 16 bytes per
// block of 16 x 8 elements and lane. `address_smem` is the address for this lane.
template <int kN>
__device__ __forceinline__ void put_fragments(uint32_t address_smem, const float (&values)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    ptx::st_shared_v4(address_smem + n * 512,
                      make_uint4(__float_as_uint(values[n][0]), __float_as_uint(values[n][1]),
                                 __float_as_uint(values[n][2]), __float_as_uint(values[n][3])));
  }
}

// Adds fragments that another warp has stored by put_fragments().
template <int kN>
__device__ __forceinline__ void add_fragments(uint32_t address_smem, float (&values)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const uint4 words = ptx::ld_shared_v4(address_smem + n * 512);
    values[n][0] += __uint_as_float(words.x);
    values[n][1] += __uint_as_float(words.y);
    values[n][2] += __uint_as_float(words.z);
    values[n][3] += __uint_as_float(words.w);
  }
}

// Clears each half word of an operand register unless the bit of its row is set.
__device__ __forceinline__ uint32_t keep_halves(uint32_t pair, uint32_t bits) {
  return pair & ((bits & 1 ? 0x0000ffffu : 0) | (bits & 2 ? 0xffff0000u : 0));
}

// acc += A B, where `a_reader` and `b_reader` give the first blocks. Rows of B whose bit in `kept`
// is not set are cleared. Bits 2 n and 2 n + 1 are those of the two rows that this thread holds of
// the n-th 8 rows of B.
template <typename Element, int kM, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void add_kept_product(float (&acc)[kM][kN][4],
                                                 const BlockReader<TileA>& a_reader,
                                                 const BlockReader<TileB>& b_reader,
                                                 uint32_t kept) {
  matmul<Element, TileB::kRows / 16>(
      acc, [&](uint32_t (&a)[4], int m, int k) { ptx::ldmatrix_x4(a, a_reader.at(m * 16, k * 2)); },
      [&](uint32_t (&b)[4], int n, int k) {
        ptx::ldmatrix_x4_trans(b, b_reader.at(k * 16, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = keep_halves(b[i], kept >> (4 * k + i % 2 * 2));
      });
}

// Stores accumulator fragments, rounded to the element type, to a tile at (row, 8 * chunk).
template <typename Element, typename Tile, int kM, int kN>
__device__ __forceinline__ void store_fragments(const Tile& tile, int row, int chunk,
                                                const float (&values)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kIsFloat32<Element>) {
          uint2 pair = make_uint2(__float_as_uint(values[m][n][2 * half]),
                                  __float_as_uint(values[m][n][2 * half + 1]));
          if constexpr (std::is_same_v<Element, Tf32>) {
            pair = make_uint2(ptx::round_to_tf32(pair.x), ptx::round_to_tf32(pair.y));
          }
          ptx::st_shared_v2(
              tile.address(row + fragment_row(m, 2 * half), 2 * (chunk + n) + threadIdx.x % 4 / 2) +
                  threadIdx.x % 2 * 8,
              pair);
        } else {
          ptx::st_shared_b32(
              tile.address(row + fragment_row(m, 2 * half), chunk + n) + threadIdx.x % 4 * 4,
              ptx::cvt_rn_x2<Element>(values[m][n][2 * half], values[m][n][2 * half + 1]));
        }
      }
    }
  }
}

}  // namespace jax_flash::sm80
