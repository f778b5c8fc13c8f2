// Applies a mask that all queries of a head share, such as that of a padded batch, in the sm_90
// forward kernels with Config::kKeyMask. Apart from it, they are kernels without modifiers.
//
// A kernel that runs before them, key_mask_kernel(), finds the hull of the allowed keys: from the
// first one to past the last one. Producers add the hull to the band and to QueryWork::attended, so
// that key tiles outside are not read, and keys outside are masked and their values zeroed as those
// beyond an edge of the band. If the hull has holes, forbidden keys inside it, consumers also read
// a bit for each key.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/mask_matrices.h"
#include "plan/mask_words.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/key_mask.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

// Describes the keys that a row of the mask allows.
struct KeyHull {
  int32_t first, end;  // equal if it allows none
  bool has_holes;
};

// Gives the kernels access to a mask: for each [batch, heads] that it has, a hull, and KeyBits for
// each key tile.
struct KeyMask {
  const KeyHull* hulls = nullptr;
  const KeyBits* bits = nullptr;
  int32_t batch[2] = {}, head = 0, tiles = 0;  // strides in hulls, and the number of key tiles

  KeyMask() = default;
  // Hulls follow the bits. Both take less of the workspace than MaskWords would.
  KeyMask(const MaskWords& words, void* workspace)
      : bits(static_cast<const KeyBits*>(workspace)), tiles(words.tiles) {
    hulls = reinterpret_cast<const KeyHull*>(bits + words.matrices() * tiles);
    static_assert(sizeof(KeyHull) <= MaskWords::kRangeBytes);
    static_assert(sizeof(KeyBits) <= MaskWords::kThreads * MaskWords::kPairBytes);
    if (words.heads > 1) head = 1;
    if (words.batch[1] > 1) batch[1] = words.heads;
    if (words.batch[0] > 1) batch[0] = words.heads * words.batch[1];
  }

  __device__ __forceinline__ int32_t index(const QueryTileIndex& q) const {
    return q.batch_axes[0] * batch[0] + q.batch_axes[1] * batch[1] + q.head * head;
  }
  // Restricts a query tile's band, and finds its key tiles.
  template <int kBlockQ, int kBlockKv>
  __device__ __forceinline__ Range restrict_to_hull(Band& band, const QueryTileIndex& q,
                                                    int32_t row0) const {
    const KeyHull& hull = hulls[index(q)];
    band.kv_len = min(band.kv_len, hull.end);
    const Range range = kv_tiles<kBlockKv>(band, row0, row0 + kBlockQ);
    return {max(range.first, hull.first / kBlockKv), range.end};
  }
  // Completes a query tile's description.
  __device__ __forceinline__ void describe(const QueryTileIndex& q, QueryWork& work) const {
    const int32_t at = index(q);
    const KeyHull& hull = hulls[at];
    work.attended.first = max(work.attended.first, hull.first);
    work.modifiers.mask = hull.has_holes ? int64_t{at} * tiles : kNoHoles;
  }
  static constexpr int64_t kNoHoles = -1;
};

// Sets logits of a warp's rows, which begin with row0, to -inf where the mask or the band forbids
// their keys. `allowed`: bits of the thread's columns; `first`: the first key of the hull.
template <typename Config, int kN>
__device__ __forceinline__ void forbid_columns(float (&scores)[kN][4], uint32_t allowed,
                                               const Band& band, int32_t first, int32_t row0,
                                               int32_t col0) {
  AllowedBits bits;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half), base = col0 + fragment_col(0, 0);
    bits.row[half] = allowed & bits_below(band.end_col(row) - base) &
                     ~bits_below(max(band.first_col(row), first) - base);
  }
  constexpr int kBlocks = Config::kHeadDim > 64 ? Config::kHeadDim / 64 : 1;
#pragma unroll
  for (int n = 0; n < kN; n += kBlocks) forbid<kBlocks>(scores, bits, n);
}

// Zeroes the rows of a tile of V whose keys the mask forbids, as zero_unattended() does.
template <typename Config>
__device__ __forceinline__ void zero_holes(const typename Config::ValueTile& tile_smem,
                                           KeyBits bits) {
  constexpr uint32_t kAll = kAllBits<Config::kBlockKv / 8>;
  if ((bits.words[0] & bits.words[1] & bits.words[2] & bits.words[3]) == kAll) return;
  using Tile = typename Config::ValueTile;
  for (int index = threadIdx.x % kWarpgroup; index < Tile::kBytes / 16; index += kWarpgroup) {
    const int row = index % (Tile::kPanelBytes / 16) / 8;
    const uint32_t low = row & 2 ? bits.words[1] : bits.words[0];
    const uint32_t high = row & 2 ? bits.words[3] : bits.words[2];
    if (!((row & 4 ? high : low) >> (row / 8 * 2 + row % 2) & 1)) {
      ptx::st_shared_v4(tile_smem.root + tile_smem.offset + index * 16, uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup);
}

inline constexpr int kKeyMaskThreads = 512;

// Finds the hulls and the bits. The grid has a block for each [batch, heads] of the mask; a warp
// takes a key tile at a time.
template <int kBlockKv>
__global__ void __launch_bounds__(kKeyMaskThreads)
    key_mask_kernel(const __grid_constant__ Operand mask, const __grid_constant__ MaskWords words,
                    int32_t kv_len, KeyBits* bits, KeyHull* hulls) {
  ptx::griddepcontrol_launch_dependents();
  constexpr int kWarps = kKeyMaskThreads / 32, kParts = (kBlockKv + 31) / 32;
  static_assert(kParts <= 4);
  const int32_t head = blockIdx.x % words.heads, batch = blockIdx.x / words.heads;
  const uint8_t* row = static_cast<const uint8_t*>(mask.data) + head * mask.head +
                       batch % words.batch[1] * mask.batch[1] +
                       batch / words.batch[1] * mask.batch[0];
  const int lane = threadIdx.x % 32;
  __shared__ int32_t first, end, count;
  if (threadIdx.x == 0) {
    first = INT32_MAX;
    end = count = 0;
  }
  __syncthreads();
  Range hull = {INT32_MAX, 0};
  int32_t allowed = 0;
  for (int32_t tile = threadIdx.x / 32; tile < words.tiles; tile += kWarps) {
    uint32_t found[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int col = 32 * i + lane;
      const int32_t key = tile * kBlockKv + col;
      const bool exists = col < kBlockKv && key < kv_len;
      found[i] = exists ? row[key * mask.col] : 0;
    }
    uint32_t own = 0;  // a word of KeyBits
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint32_t keys = __ballot_sync(0xffffffff, found[i] != 0);
      if (keys == 0) continue;
      const int32_t part = tile * kBlockKv + 32 * i;
      hull = {min(hull.first, part + __ffs(keys) - 1), part + 32 - __clz(keys)};
      allowed += __popc(keys);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        own |= (keys >> (8 * n + lane % 4 * 2) & 3) << (2 * (4 * i + n));
      }
    }
    if (lane < 4) bits[int64_t{blockIdx.x} * words.tiles + tile].words[lane] = own;
  }
  if (lane == 0) {
    atomicMin(&first, hull.first);
    atomicMax(&end, hull.end);
    atomicAdd(&count, allowed);
  }
  __syncthreads();
  if (threadIdx.x == 0) hulls[blockIdx.x] = {min(first, end), end, count < end - first};
}

// Launches the kernel that finds hulls and bits.
template <int kBlockKv>
Status launch_key_mask(const Forward& params, KeyMask& made, cudaStream_t stream) {
  const MaskWords words(params.shape, params.mask, kBlockKv);
  made = KeyMask(words, params.workspace);
  return launch_kernel("sm90::key_mask_kernel", params.shape, key_mask_kernel<kBlockKv>,
                       words.matrices(), kKeyMaskThreads, 0, stream, params.mask, words,
                       params.shape.kv_len, const_cast<KeyBits*>(made.bits),
                       const_cast<KeyHull*>(made.hulls));
}

}  // namespace jax_flash::sm90
