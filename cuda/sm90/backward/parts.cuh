// Defines building blocks of the sm_90 backward kernels: the order of key blocks and of their query
// tiles, turns, copies, and the zeroing of rows that nobody may attend to.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/divisor.h"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Holds the tensor maps of the operands, then those of the gradients of keys and values.
struct BackwardMaps {
  CUtensorMap query, key, value, dout;
};
struct KeyGradientMaps {
  CUtensorMap dkey, dvalue;
};

// Maps an index to the head and key tile that a block owns. Sections of `section_heads` heads (of
// all batches, numbered consecutively) follow each other; in a section, all heads' first tiles come
// first, then all heads' second tiles, and so on.
struct TileSchedule {
  int32_t tiles = 0, total_heads = 0, sections = 0;
  Divisor section_heads, last_section_heads, section_blocks;
  bool last_first = false;
  bool alternates = false;  // every other section has its heads' last tiles first

  TileSchedule() = default;
  TileSchedule(int64_t tiles_of_head, int64_t heads, int64_t heads_of_section,
               bool last_tiles_first)
      : tiles(static_cast<int32_t>(tiles_of_head)),
        total_heads(static_cast<int32_t>(heads)),
        sections(static_cast<int32_t>((heads + heads_of_section - 1) / heads_of_section)),
        section_heads(static_cast<int32_t>(heads_of_section)),
        last_section_heads(
            static_cast<int32_t>(std::max<int64_t>(heads - (sections - 1) * heads_of_section, 1))),
        section_blocks(static_cast<int32_t>(
            std::clamp<int64_t>(heads_of_section * tiles_of_head, 1, INT32_MAX))),
        last_first(last_tiles_first) {}

  // Returns the section's number.
  __device__ __forceinline__ int32_t at(int32_t index, int32_t& head, int32_t& tile) const {
    const int32_t section = section_blocks.quotient(index);
    const int32_t rest = index - section * section_blocks.divisor;
    const Divisor& heads_here = section == sections - 1 ? last_section_heads : section_heads;
    tile = heads_here.quotient(rest);
    head = section * section_heads.divisor + rest - tile * heads_here.divisor;
    if (last_first || (alternates && section % 2 != 0)) tile = tiles - 1 - tile;
    return section;
  }
};

// Says how several blocks take turns to add to a sum for dQ, independently of timing. Turns have
// the order in which blocks would come if all of a section started together, or each when a block
// of the section before ends: then hardly any block waits. All blocks of a section must run at the
// same time. They do, because a launch has as many thread blocks as a section has blocks, and each
// takes one of every section.
enum class TurnOrder : int32_t {
  kNone,
  kTogether,
  kAscending,  // a head has too many blocks: each waits only for those of lower keys
};

// Names a query tile of a query head.
struct HeadTile {
  int32_t head, tile;
};

// Walks over the query tiles that a block visits, for all heads of a group, head by head. Within a
// head it may start at any tile and wrap around, or go from the last to the first. Whole warps call
// its functions.
struct QueryTileWalk {
  TileRange range;
  int32_t first_head, end_head;
  int32_t start = 0, first_tile = 0;  // where each head starts, and where the first one does
  bool backward = false;
  const SegmentSpan* query_spans = nullptr;
  int32_t query_blocks = 0;
  SegmentSpan key_span = {};

  template <int kBlockQ>
  __device__ __forceinline__ int32_t skip_to(int32_t candidate) const {
    if (query_spans == nullptr) return candidate;
    return next_tile<kBlockQ>(query_spans, query_blocks, key_span, candidate, range.end);
  }
  template <int kBlockQ>
  __device__ __forceinline__ void start_at(int32_t shift) {
    start = skip_to<kBlockQ>(range.first + shift);
    first_tile = start;
    if (range.first >= range.end || start >= range.end) first_head = end_head;
  }
  // Continues from the tile of an index.
  __device__ __forceinline__ void skip(int32_t index) {
    const HeadTile cursor = at(index);
    first_head = cursor.head;
    first_tile = cursor.tile;
  }
  __device__ __forceinline__ HeadTile begin() const { return {first_head, first_tile}; }
  __device__ __forceinline__ bool done(const HeadTile& at) const { return at.head >= end_head; }
  template <int kBlockQ>
  __device__ __forceinline__ int32_t count() const {
    if (query_spans == nullptr) return (range.end - range.first) * (end_head - first_head);
    int32_t tiles = 0;
    for (HeadTile at = begin(); !done(at); advance<kBlockQ>(at)) ++tiles;
    return tiles;
  }
  // Returns the tile of an index in this order, if nothing is skipped.
  __device__ __forceinline__ HeadTile at(int32_t index) const {
    const int32_t tiles = range.end - range.first, heads = index / tiles;
    const int32_t place = index - heads * tiles;
    const int32_t tile = backward ? start - place : start + place;
    return {first_head + heads, tile < range.end ? tile : tile - tiles};
  }
  // Advances to the next tile. kOrdered: with turns; without them no walk goes backward.
  template <int kBlockQ, bool kOrdered = false>
  __device__ __forceinline__ void advance(HeadTile& at) const {
    const bool down = kOrdered && backward;
    at.tile = down ? at.tile - 1 : skip_to<kBlockQ>(at.tile + 1);
    if (down && at.tile < range.first) at.tile = start;
    // With segments nothing is shifted, and the first tile that is not skipped is `start`.
    if (at.tile >= range.end) at.tile = query_spans ? start : range.first;
    if (at.tile == start) ++at.head;
  }
};

// True if every row may attend to every key. Then all blocks visit all tiles, and start shifted.
__device__ __forceinline__ bool is_rectangle(const Band& band) {
  return band.lo <= 1 - band.q_len && band.hi >= band.kv_len;
}

// Returns by how many tiles the start of a block of a rectangle is shifted, if there are turns.
template <int kBlockKv>
__device__ __forceinline__ int32_t shifted_start(const Band& band, const TileRange& range,
                                                 int32_t kv_tile) {
  const int32_t kv_tiles_here = (band.kv_len + kBlockKv - 1) / kBlockKv;
  return static_cast<int32_t>(static_cast<uint32_t>(kv_tile) * (range.end - range.first) /
                              kv_tiles_here);
}

// Returns how many of the blocks that add to a query tile, those of `range`, do so before the block
// of tile kv_tile. They are those that reach it earlier (see TurnOrder) if all take equally long
// for a tile. With kSums sums, each has every kSums-th tile.
template <int kSums>
__device__ __forceinline__ int32_t turn_of(const Band& band, bool ascending, int32_t kv_tile,
                                           int32_t q_tile, int32_t q_tiles_total,
                                           const TileRange& range) {
  if (ascending) return (kv_tile - range.first) / kSums;
  const int32_t later = (range.end - 1 - kv_tile) / kSums;
  if (!is_rectangle(band)) return later;
  // Blocks up to `last` start at this tile or before it; the later of them reach it first. The
  // others wrap around to it.
  const uint32_t ends = static_cast<uint32_t>(q_tile + 1) * range.end;  // host: fits
  const int32_t last = static_cast<int32_t>((ends + q_tiles_total - 1) / q_tiles_total) - 1;
  return kv_tile <= last ? (last - kv_tile) / kSums
                         : (last + kSums - kv_tile % kSums) / kSums + later;
}

// Returns the tile with an address that is opaque to the compiler: it would otherwise compute all
// descriptors of an invariant tile before the loop, and spill them.
template <typename Tile>
__device__ __forceinline__ Tile unknown_address(Tile tile) {
  asm volatile("" : "+r"(tile.root));
  return tile;
}

// Returns threadIdx.x as a value that the compiler keeps. It would otherwise read the special
// register again at every use, and such a read waits until the tensor cores have accepted all
// products that the warp has started.
__device__ __forceinline__ int kept_thread_index() {
  int index = threadIdx.x;
  asm volatile("" : "+r"(index));
  return index;
}

// Computes the descriptors of wgmma_tile.cuh as sums, whose constant terms the compiler folds: one
// addition for each, whereas an `or` with the constant bits takes another instruction.
template <typename Tile>
__device__ __forceinline__ uint64_t summed_descriptor(const Tile& tile, uint32_t leading_bytes,
                                                      uint32_t offset) {
  return descriptor_layout(leading_bytes, 1024) + (offset >> 4) + ((tile.root + tile.offset) >> 4);
}
template <typename Tile>
__device__ __forceinline__ uint64_t operand_k_major(const Tile& tile, int row0, int k) {
  return summed_descriptor(tile, 16, k / 4 * Tile::kPanelBytes + row0 * 128 + k % 4 * 32);
}
template <typename Tile>
__device__ __forceinline__ uint64_t operand_mn_major(const Tile& tile, int col0, int k) {
  return summed_descriptor(tile, Tile::kPanelBytes, col0 / 64 * Tile::kPanelBytes + k * 16 * 128);
}

// Holds the state of a ring of two stages in one register.
struct StagePair {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count & 1; }
  __device__ __forceinline__ uint32_t parity() const { return count >> 1 & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

// Arrives for a whole warp: everything that its threads have done happens before a wait for the
// barrier returns.
__device__ __forceinline__ void arrive_by_warp(uint32_t barrier_smem) {
  __syncwarp();
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier_smem);
}

// Starts copying rows row0... of a head to a tile of shared memory. Called by one thread, which has
// announced the bytes.
template <typename Tile>
__device__ __forceinline__ void load_tile_panels(const Tile& tile, const CUtensorMap& map,
                                                 uint32_t barrier_smem, const Operand& operand,
                                                 const BatchIndex& batch, int32_t head,
                                                 int32_t row0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    load_box(tile.root + tile.offset + panel * Tile::kPanelBytes, map, barrier_smem, operand, batch,
             head, row0, panel * 64);
  }
}

// Starts copying a tile to rows row0... of a head. Called by one thread. Rows past the end of the
// operand are not written.
template <typename Tile>
__device__ __forceinline__ void store_tile_panels(const Tile& tile, const CUtensorMap& map,
                                                  const Operand& operand, const BatchIndex& batch,
                                                  int32_t head, int32_t row0) {
  const auto coordinate = [](int64_t stride, int64_t index) {
    return stride == 0 ? 0 : static_cast<int32_t>(index);
  };
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::cp_async_bulk_tensor_store_5d(map, tile.root + tile.offset + panel * Tile::kPanelBytes,
                                       panel * 64, coordinate(operand.row, row0),
                                       coordinate(operand.head, head),
                                       coordinate(operand.batch[0], batch.coordinate[0]),
                                       coordinate(operand.batch[1], batch.coordinate[1]));
  }
}

// Zeroes the rows of a tile outside [first, end): they may hold NaN, and NaN times 0 is not 0.
// Called by kThreads threads from thread 128 on, which `barrier` synchronizes: one consumer
// warpgroup, or both if threads read the tile; one consumer must then not write the rows of the
// other.
template <int kThreads = 128, typename Tile>
__device__ __forceinline__ void zero_rows(const Tile& tile, int32_t first, int32_t end,
                                          int barrier) {
  for (int index = (threadIdx.x - 128) % kThreads; index < Tile::kBytes / 16; index += kThreads) {
    const int row = index % (Tile::kPanelBytes / 16) / 8;
    if (row < first || row >= end) {
      ptx::st_shared_v4(tile.root + tile.offset + index * 16, uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, kThreads);
}

// Rounds 16 rows of fragments of kN blocks to register operands of kN / 2 products.
template <typename Element, int kN>
__device__ __forceinline__ void round_fragments(uint32_t (&out)[kN / 2][4],
                                                const float (&values)[kN][4]) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&block)[4] = values[2 * k + i / 2];
      out[k][i] = ptx::cvt_rn_x2<Element>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
    }
  }
}

// Stores 64 columns of them as rows [row, row + 16) of a panel of a tile. `lane` is the caller's.
template <typename Tile>
__device__ __forceinline__ void store_rounded(const Tile& tile, int row, int panel,
                                              const uint32_t (&values)[4][4], int lane) {
  const uint32_t base = tile.address(row + lane % 16, lane / 16) + panel * Tile::kPanelBytes;
#pragma unroll
  for (int k = 0; k < 4; ++k) ptx::stmatrix_x4(base ^ (k * 32), values[k]);
}

// Stores accumulators, times `scale`, as rows [row, row + 16) of a tile.
template <typename Element, typename Tile, int kN>
__device__ __forceinline__ void store_sums(const Tile& tile, int row, float scale,
                                           float (&sums)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= scale;
  }
  uint32_t rounded[kN / 2][4];
  round_fragments<Element>(rounded, sums);
  const int lane = threadIdx.x % 32;
  const uint32_t base = tile.address(row + lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) {
    ptx::stmatrix_x4((base ^ (k % 4 * 32)) + k / 4 * Tile::kPanelBytes, rounded[k]);
  }
}

// Loads rows [row, row + 16) of a tile as register operands.
template <typename Tile, int kSteps>
__device__ __forceinline__ void load_fragments(uint32_t (&values)[kSteps][4], const Tile& tile,
                                               int row) {
  const BlockReader reader(tile, BlockOrder::kRowsFirst, row, 0);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) ptx::ldmatrix_x4(values[k], reader.at(0, k * 2));
}

// Ends the life of the values for the compiler: a product that overwrites accumulators also names
// them as inputs, which would keep their registers occupied until then.
template <int kN>
__device__ __forceinline__ void forget(float (&values)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(values[n][e]));
  }
}

template <int kN>
__device__ __forceinline__ void clear(float (&values)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[n][e] = 0.0f;
  }
}

// Stores accumulators in the order of the workspace: block n of all threads, then block n + 1.
// `thread` is the caller's number in its warpgroup.
template <int kN>
__device__ __forceinline__ void stage_accumulators(uint32_t address_smem,
                                                   const float (&values)[kN][4], int thread) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    ptx::st_shared_v4(address_smem + (n * 128 + thread) * 16,
                      make_uint4(__float_as_uint(values[n][0]), __float_as_uint(values[n][1]),
                                 __float_as_uint(values[n][2]), __float_as_uint(values[n][3])));
  }
}

// Loads what the same thread stored, or the thread with the same number in another warpgroup.
template <int kN>
__device__ __forceinline__ void load_staged(float (&values)[kN][4], uint32_t address_smem) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const uint4 words = ptx::ld_shared_v4(address_smem + (n * 128 + threadIdx.x % 128) * 16);
    values[n][0] = __uint_as_float(words.x);
    values[n][1] = __uint_as_float(words.y);
    values[n][2] = __uint_as_float(words.z);
    values[n][3] = __uint_as_float(words.w);
  }
}

}  // namespace jax_flash::sm90
