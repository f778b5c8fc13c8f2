// Multiplies the only row of a unit in float32, for the decoding kernel. Tensor cores would compute
// 16 rows, of operands that are rounded or split.
//
// Logits have the layout of accumulator fragments, but each of the eight groups of four lanes holds
// the same row: lane t of a group has keys 2 t and 2 t + 1 of each eight. Group g sums over columns
// 4 g to 4 g + 3 of each 32:
//
//   S = Q K^T: a lane multiplies these columns of its keys, and the groups add up their sums
//   O += P V:  a lane keeps sums of these columns over its own keys; the lanes of a group add them
//              up after the last tile
#pragma once

#include <cstdint>

#include "ptx/shared.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// Reads a lane's columns of a tile of K or V. The eight lanes of a phase read all 32 banks.
template <typename Tile>
struct OneRowReader {
  uint32_t lane_address;
  uint32_t offset;

  __device__ __forceinline__ explicit OneRowReader(const Tile& tile)
      : lane_address(tile.root_address(threadIdx.x % 4 * 2, threadIdx.x % 32 / 4)),
        offset(tile.offset) {}
  // Returns the four columns of 32 in number `panel`, of key 2 t + e of eight in number n.
  __device__ __forceinline__ float4 at(int n, int e, int panel) const {
    return ptx::ld_shared_v4_f32((lane_address ^ (Tile::swizzle(e) * 16)) + offset +
                                 panel * Tile::kPanelBytes + (n * 8 + e) * 128);
  }
};

__device__ __forceinline__ float add_product(float sum, const float4& a, const float4& b) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

// Sets S. The fragments' other row has no keys.
template <int kN, typename QueryTile, typename KeyTile>
__device__ __forceinline__ void multiply_one_row(float (&products)[1][kN][4],
                                                 const QueryTile& query_tile,
                                                 const KeyTile& key_tile) {
  const OneRowReader<KeyTile> reader(key_tile);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    products[0][n][0] = products[0][n][1] = 0.0f;
    products[0][n][2] = products[0][n][3] = minus_infinity();
  }
#pragma unroll
  for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
    const float4 query =
        ptx::ld_shared_v4_f32(query_tile.address(0, panel * 8 + threadIdx.x % 32 / 4));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        products[0][n][e] = add_product(products[0][n][e], query, reader.at(n, e, panel));
      }
    }
  }
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        products[0][n][e] += __shfl_xor_sync(0xffffffff, products[0][n][e], distance);
      }
    }
  }
}

// O += P V. `attended`: attended_columns(). Other keys are skipped, since their V may hold NaN.
// out[0][2 i] and out[0][2 i + 1] have columns 32 i + 4 g to 32 i + 4 g + 3, in their first rows.
template <int kN, int kOutN, typename Tile>
__device__ __forceinline__ void add_one_row(float (&out)[1][kOutN][4],
                                            const float (&probabilities)[1][kN][4],
                                            const Tile& value_tile, uint32_t attended) {
  const OneRowReader<Tile> reader(value_tile);
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    const float probability = probabilities[0][i / 2][i % 2];
    const bool attends = attended >> i & 1;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const float4 value = reader.at(i / 2, i % 2, panel);
      float (&low)[4] = out[0][2 * panel], (&high)[4] = out[0][2 * panel + 1];
      if (attends) {
        low[0] = fmaf(probability, value.x, low[0]);
        low[1] = fmaf(probability, value.y, low[1]);
        high[0] = fmaf(probability, value.z, high[0]);
        high[1] = fmaf(probability, value.w, high[1]);
      }
    }
  }
}

// Adds up a number of the lanes of each group.
__device__ __forceinline__ float total_of_group(float value) {
  value += __shfl_xor_sync(0xffffffff, value, 1);
  return value + __shfl_xor_sync(0xffffffff, value, 2);
}

// Stores a warp's sums, which are in the order of O.
template <int kOutN>
__device__ __forceinline__ void put_columns(float* values, const float (&out)[1][kOutN][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int panel = 0; panel < kOutN / 2; ++panel) {
    const float (&low)[4] = out[0][2 * panel], (&high)[4] = out[0][2 * panel + 1];
    const float4 columns = {total_of_group(low[0]), total_of_group(low[1]), total_of_group(high[0]),
                            total_of_group(high[1])};
    if (lane % 4 == 0) *reinterpret_cast<float4*>(values + panel * 32 + lane) = columns;
  }
}

// Stores a warp's O, and its statistics.
template <int kOutN>
__device__ __forceinline__ void put_one_row(float* values, float2& statistics,
                                            const float (&out)[1][kOutN][4],
                                            const OnlineSoftmax<1, true>& softmax) {
  const float sum = total_of_group(softmax.sum[0][0]);
  if (threadIdx.x % 32 == 0) statistics = {softmax.maximum[0][0], sum};
  put_columns(values, out);
}

}  // namespace jax_flash::sm80
