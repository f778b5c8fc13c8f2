// Provides parts of the sm_90 forward kernel: addresses and barriers in shared memory, slots that
// pass plans between warps, exponentials, masking at edges, clearing of V, and the epilogue.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "modifiers/logits.cuh"
#include "params.h"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/redo.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward/values.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Numbers the named barriers: those of warpgroups that divide the keys; that of the start; and,
// from kZeroed on, one for each warpgroup, for zero_unattended() and votes.
enum ForwardBarrier : int { kPartialFull = 1, kPartialEmpty = 2, kStarted = 3, kZeroed = 8 };

// The next two are used if key tiles are skipped. They hold what is determined before copies start:
// for a query tile, and for 32 of its key tiles. If a query tile has more key tiles, further plans
// follow.
struct QueryTilePlan {
  QueryTileIndex index;
  QueryWork work;
  QuerySegments segments;
};
struct KeyTilesPlan {
  QueryTileIndex index;
  int32_t base;                // the first of these tiles; negative: there is no more work
  uint32_t read, one_segment;  // as in SegmentTiles
  bool is_last;
  // The planning warp may go on when the copies of all but `left` of the tiles to be read have been
  // started.
  int32_t left;
};

// A slot in shared memory that one warp writes and others read, alternately. `turns` counts a
// warp's waits, and its lowest bit is the parity of the barrier's phase.
template <typename T>
struct Slot {
  T value;
  uint64_t barriers[2];

  __device__ __forceinline__ uint32_t full() const { return ptx::shared_address(&barriers[0]); }
  __device__ __forceinline__ uint32_t empty() const { return ptx::shared_address(&barriers[1]); }
  __device__ __forceinline__ void init(int readers) const {
    ptx::mbarrier_init(full(), 1);
    ptx::mbarrier_init(empty(), readers);
  }
  __device__ __forceinline__ void wait_full(uint32_t& turns) const {
    ptx::mbarrier_wait_asleep(full(), turns++ & 1);
  }
  __device__ __forceinline__ void wait_empty(uint32_t& turns) const {
    ptx::mbarrier_wait_asleep(empty(), ~turns++ & 1);
  }
};

// Holds what producers pass to consumers if key tiles are skipped.
template <typename Config>
struct SegmentNotes {
  KeyTileNote notes[Config::kStages];
  QuerySegments queries[Config::kRowGroups * Config::kWorks];  // one for each of ForwardSmem::works
  // For each consumer warp's last tile, if it had several segments: the keys that no row of the
  // block may attend to. Bit i of word j is key 4 i + j.
  uint32_t unattended[Config::kConsumers * 4][4];
  // The next plans, from the planning warp to those that start copies.
  Slot<QueryTilePlan> query;
  Slot<KeyTilesPlan> keys;
};

// Gives the addresses of a block's tiles and barriers. A `full` barrier completes its phase when a
// stage's copy has arrived, an `empty` one when every consumer warp has finished with the stage.
template <typename Config>
struct ForwardSmem {
  static constexpr int kQueryBarriers = Config::kQueryStages * Config::kRowGroups;
  static constexpr int kBoxBarriers = Config::kBiasBoxes ? Config::kRowGroups : 0;
  static constexpr int kBarriers = 3 * kQueryBarriers + 2 * kBoxBarriers + 4 * Config::kStages;
  static constexpr int kWorks = Config::kRowGroups * Config::kWorks;
  uint32_t root, barriers;
  QueryWork* works;                                     // [kRowGroups][kWorks]
  SegmentNotes<Config>* segments;                       // used if key tiles are skipped
  QueryTilesToRedo* to_redo;                            // used if kChecksLate
  ValueConversions<Config::kValueStages>* conversions;  // used if kConvertsValues

  __device__ __forceinline__ typename Config::QueryTile query(uint32_t stage, int group) const {
    return {root, (stage * Config::kRowGroups + group) * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::KeyTile key(uint32_t stage) const {
    return {root, Config::kKeyOffset + stage * Config::KeyTile::kBytes};
  }
  __device__ __forceinline__ typename Config::ValueTile value(uint32_t stage) const {
    return {root, Config::kValueOffset + stage * Config::ValueTile::kBytes};
  }
  // Returns the address of a consumer warp's own staging area.
  __device__ __forceinline__ uint32_t own(int consumer_warp) const {
    return root + Config::kOwnOffset + consumer_warp * Config::kOwnBytes;
  }
  __device__ __forceinline__ uint32_t partial() const { return root + Config::kPartialOffset; }
  // Returns the n-th query tile of a consumer; the next kWorks - 1 do not overwrite it.
  __device__ __forceinline__ QueryWork& work(int group, uint32_t n) const {
    return works[group * Config::kWorks + n % Config::kWorks];
  }
  __device__ __forceinline__ QuerySegments& query_segments(int group, uint32_t n) const {
    return segments->queries[group * Config::kWorks + n % Config::kWorks];
  }
  __device__ __forceinline__ uint32_t query_full(uint32_t stage, int group) const {
    return barriers + (stage * Config::kRowGroups + group) * 8;
  }
  __device__ __forceinline__ uint32_t query_empty(uint32_t stage, int group) const {
    return query_full(stage, group) + kQueryBarriers * 8;
  }
  // Returns the barrier for the part of a query tile's description that query_full() does not
  // cover.
  __device__ __forceinline__ uint32_t described(uint32_t stage, int group) const {
    return at(4, 2 * kBoxBarriers + stage * Config::kRowGroups + group);
  }
  __device__ __forceinline__ uint32_t key_full(uint32_t stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t key_empty(uint32_t stage) const { return at(1, stage); }
  __device__ __forceinline__ uint32_t value_full(uint32_t stage) const { return at(2, stage); }
  __device__ __forceinline__ uint32_t value_empty(uint32_t stage) const { return at(3, stage); }
  __device__ __forceinline__ uint32_t bias_full(int group) const { return at(4, group); }
  __device__ __forceinline__ uint32_t bias_empty(int group) const {
    return at(4, kBoxBarriers + group);
  }

  // Called by one thread: several lanes would take longer. `value_arrivals`: number of arrivals
  // that value_full() expects.
  __device__ __forceinline__ void init_barriers(int value_arrivals) const {
    constexpr uint32_t kConsumerWarps = Config::kConsumers * 4;
    constexpr uint32_t kKeyArrivals = Config::kRowGroups * 4 * kWarpArrivals;
    for (int index = 0; index < kQueryBarriers; ++index) {
      ptx::mbarrier_init(barriers + index * 8, 2);  // arrivals for Q and for its range of keys
      ptx::mbarrier_init(described(0, 0) + index * 8, 1);
      ptx::mbarrier_init(barriers + (kQueryBarriers + index) * 8,
                         kConsumerWarps / Config::kRowGroups * kWarpArrivals);
    }
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(key_full(stage), 1);
      ptx::mbarrier_init(key_empty(stage), kKeyArrivals);
      ptx::mbarrier_init(value_full(stage), value_arrivals);
      ptx::mbarrier_init(value_empty(stage), kKeyArrivals);
    }
    for (int group = 0; group < kBoxBarriers; ++group) {
      ptx::mbarrier_init(bias_full(group), 1);
      ptx::mbarrier_init(bias_empty(group), kConsumerWarps / Config::kRowGroups);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t at(uint32_t kind, uint32_t stage) const {
    return barriers + (2 * kQueryBarriers + kind * Config::kStages + stage) * 8;
  }
};

// Starts copying rows row0... of a head to a tile of shared memory. Called by one thread.
template <typename Tile>
__device__ __forceinline__ void load_tile_boxes(const Tile& tile, const CUtensorMap& map,
                                                uint32_t barrier_smem, const BoxAxes& axes,
                                                const int32_t (&batch)[kTensorMapBatchDims],
                                                int32_t head, int32_t row0) {
  ptx::mbarrier_arrive_expect_tx(barrier_smem, Tile::kBytes);
  load_panels(tile, map, barrier_smem, axes, batch, head, row0);
}

// Zeroes the rows of a tile of V outside `attended`, which no row of the block may attend to. They
// may hold NaN, and a product of NaN with a probability of 0 is NaN. Rows from kv_len on are zeros
// already. Every consumer warpgroup does this, with the same result.
template <typename Config>
__device__ __forceinline__ void zero_unattended(const typename Config::ValueTile& tile_smem,
                                                int32_t tile, const Range& attended,
                                                int32_t kv_len) {
  const int32_t row0 = tile * Config::kBlockKv;
  const int32_t first = max(attended.first - row0, 0), end = attended.end - row0;
  if (first == 0 && (end >= Config::kBlockKv || attended.end >= kv_len)) return;
  using Tile = typename Config::ValueTile;
  for (int index = threadIdx.x % kWarpgroup; index < Tile::kBytes / 16; index += kWarpgroup) {
    const int row = index % (Tile::kPanelBytes / 16) / 8;
    if (row < first || row >= end) {
      ptx::st_shared_v4(tile_smem.root + tile_smem.offset + index * 16, uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup);
}

// Returns the addend of an element's logit in log2 units: minus the row's running maximum.
struct RowShifts {
  float shift[2];

  __device__ __forceinline__ float operator()(int, int e) const { return -shift[e / 2]; }
};

// Computes the exponentials of blocks of a tile, and adds them to `sums`. Each row has two chains
// of additions, since an addition waits for the one before. addend(n, e): see RowShifts.
template <int kFirst, int kEnd, int kN, typename Addend>
__device__ __forceinline__ void exponentials_in_chains(float (&scores)[1][kN][4], float to_log2,
                                                       const Addend& addend, float (&sums)[4]) {
#pragma unroll
  for (int n = kFirst; n < kEnd; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[0][n][e] = ptx::ex2_approx_ftz(fmaf(scores[0][n][e], to_log2, addend(n, e)));
      sums[e] += scores[0][n][e];
    }
  }
}
template <int kN, typename Addend>
__device__ __forceinline__ void exponentials_in_chains(OnlineSoftmax<1>& softmax,
                                                       float (&scores)[1][kN][4], float to_log2,
                                                       const Addend& addend) {
  float sums[4] = {softmax.sum[0][0], 0.0f, softmax.sum[0][1], 0.0f};
  exponentials_in_chains<0, kN>(scores, to_log2, addend, sums);
  softmax.sum[0][0] = sums[0] + sums[1];
  softmax.sum[0][1] = sums[2] + sums[3];
}
template <int kN>
__device__ __forceinline__ void exponentials_in_chains(OnlineSoftmax<1>& softmax,
                                                       float (&scores)[1][kN][4], float to_log2,
                                                       const float (&shift)[2]) {
  exponentials_in_chains(softmax, scores, to_log2, RowShifts{shift[0], shift[1]});
}

// Finds the columns [first, end) that each of a thread's two rows may attend to, counted from its
// first column of a tile. Rows begin with row0.
__device__ __forceinline__ void find_edges(const Band& band, int32_t row0, int32_t col0,
                                           int32_t (&first)[2], int32_t (&end)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half), base = col0 + fragment_col(0, 0);
    first[half] = band.first_col(row) - base;
    end[half] = band.end_col(row) - base;
  }
}

// Masks a warp's rows as mask_band() does, but first checks for each edge whether it cuts the
// warp's part of the tile. Mostly only the right edge does.
template <int kN>
__device__ __forceinline__ void mask_edges(float (&logits)[1][kN][4], const Band& band,
                                           int32_t row0, int32_t col0) {
  int32_t first[2], end[2];
  find_edges(band, row0, col0, first, end);
  const auto mask = [&](auto allowed) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!allowed(n * 8 + e % 2, e / 2)) logits[0][n][e] = minus_infinity();
      }
    }
  };
  if (__any_sync(0xffffffff, min(end[0], end[1]) < kN * 8)) {
    mask([&](int col, int half) { return col < end[half]; });
  }
  if (__any_sync(0xffffffff, max(first[0], first[1]) > 0)) {
    mask([&](int col, int half) { return col >= first[half]; });
  }
}

// Masks a warp's 16 rows, which begin with row0, as mask_edges() does, but only in those pairs of
// blocks that an edge cuts. For kernels with registers for the branches.
template <int kN>
__device__ __forceinline__ void mask_pairs(float (&logits)[1][kN][4], const Band& band,
                                           int32_t row0, int32_t col0) {
  static_assert(kN % 2 == 0);
  row0 = __reduce_max_sync(0xffffffff, row0);  // the same in all lanes, as the compiler now knows
  const int32_t last = row0 + 15;
  // The pairs, of 16 columns each, that hold allowed elements, and those that hold no others.
  const Range some = {(band.first_col(row0) - col0) >> 4, (band.end_col(last) - col0 + 15) >> 4};
  const Range all = {(band.first_col(last) - col0 + 15) >> 4, (band.end_col(row0) - col0) >> 4};
  int32_t first[2], end[2];
  find_edges(band, row0, col0, first, end);
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    if (pair >= all.first && pair < all.end) continue;
    const bool none = pair < some.first || pair >= some.end;
#pragma unroll
    for (int n = 2 * pair; n < 2 * pair + 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int col = n * 8 + e % 2;
        if (none || col < first[e / 2] || col >= end[e / 2]) logits[0][n][e] = minus_infinity();
      }
    }
  }
}

// Returns the key tiles that the band does not cut, for a warpgroup's rows, which begin with
// row0.
template <int kBlockKv>
__device__ __forceinline__ Range uncut_tiles(const Band& band, int32_t row0) {
  const int32_t row_end = min(row0 + 64, band.q_len);
  const int32_t first = max(row_end + band.lo + kBlockKv - 2, 0) / kBlockKv;
  const int32_t end = max(min(band.kv_len, row0 + band.hi), 0) / kBlockKv;
  return {__reduce_max_sync(0xffffffff, first), __reduce_max_sync(0xffffffff, end)};
}

// Sets a warp's rows from `rows` on to -inf.
template <int kN>
__device__ __forceinline__ void mask_rows(float (&logits)[1][kN][4], int32_t rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (fragment_row(0, 2 * half) < rows) continue;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      logits[0][n][2 * half] = logits[0][n][2 * half + 1] = minus_infinity();
    }
  }
}

// Returns a bit 2 n + e per column fragment_col(n, e), set if some row of the warp attends to it.
template <int kN>
__device__ __forceinline__ uint32_t attended_columns(const float (&logits)[1][kN][4]) {
  static_assert(kN <= 16);
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Both are -inf if their maximum is. fmaxf ignores a single NaN: the column may then seem
      // unattended, but clear_unattended() also asks the masks.
      const float both = fmaxf(logits[0][n][e], logits[0][n][e + 2]);
      bits |= static_cast<uint32_t>(both != minus_infinity()) << (2 * n + e);
    }
  }
  for (int distance = 4; distance < 32; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  return bits;
}

template <int kN>
__device__ __forceinline__ void drop(float (&probabilities)[1][kN][4], const Kept& kept) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!kept.at<false>(n, e)) probabilities[0][n][e] = 0.0f;
    }
  }
}

// Sets bit 15 or 31 of the result if the lower or upper half is an infinity or NaN.
template <typename Element>
__device__ __forceinline__ uint32_t not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7c007c00 : 0x7f807f80;
  constexpr uint32_t kLowest = std::is_same_v<Element, __half> ? 0x04000400 : 0x00800080;
  return ((pair & kExponent) + kLowest) & 0x80008000;
}

// If a tile of V holds NaN or infinities, zeroes the rows that no row of the block may attend to,
// for the same reason as zero_unattended(). Each warp handles the keys that its own rows do not
// attend to. If a row of another warp attends to such a key, the row of V stays, and both warps may
// use it. make_allows() returns a function that decides whether a query may attend to a key, and is
// rarely called.
template <typename Config, typename Element, typename MakeAllows>
__device__ __forceinline__ void clear_unattended(const typename Config::ValueTile& tile_smem,
                                                 uint32_t attended, MakeAllows make_allows,
                                                 const Band& band, int32_t row0, int32_t tile) {
  using Tile = typename Config::ValueTile;
  constexpr uint32_t kAll = Config::kBlockKv == 128 ? ~0u : (1u << Config::kBlockKv / 4) - 1;
  if (__all_sync(0xffffffff, attended == kAll)) return;
  const int lane = threadIdx.x % 32;
  const uint32_t root = tile_smem.root + tile_smem.offset;
  uint32_t found = 0;
  for (int index = lane; index < Tile::kBytes / 16; index += 32) {
    const uint4 chunk = ptx::ld_shared_v4(root + index * 16);
    found |= not_finite<Element>(chunk.x) | not_finite<Element>(chunk.y) |
             not_finite<Element>(chunk.z) | not_finite<Element>(chunk.w);
  }
  if (!__any_sync(0xffffffff, found != 0)) return;
  const auto allows = make_allows();
  for (int col = 0; col < Config::kBlockKv; ++col) {
    const uint32_t bits = __shfl_sync(0xffffffff, attended, col % 8 / 2);
    if (bits >> (col / 8 * 2 + col % 2) & 1) continue;
    const int32_t global_col = tile * Config::kBlockKv + col;
    bool allowed = false;
    if (global_col < band.kv_len) {
      for (int32_t row = row0 + lane; row < row0 + Config::kBlockQ; row += 32) {
        allowed = allowed || allows(row, global_col);
      }
    }
    if (__any_sync(0xffffffff, allowed)) continue;
    for (int index = lane; index < Tile::kPanels * 8; index += 32) {
      ptx::st_shared_v4(root + index / 8 * Tile::kPanelBytes + col * 128 + index % 8 * 16, uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

// Finishes a row: sets its lse and its normalizer, the factor of its output.
template <uint32_t kModifiers>
struct RowStatistics {
  static __device__ __forceinline__ void finish(const ForwardPlan& plan, const QueryWork& work,
                                                int half, int32_t, const OnlineSoftmax<1>& softmax,
                                                float& lse, float& normalizer) {
    softmax.finish(0, half, plan.to_log2, work.sink_log2, lse, normalizer);
  }
};

// Returns whether a kernel may take finite logits of a row for -inf (least_logit()). The kernel for
// slopes alone does not, and has a check of its own.
constexpr bool may_take_for_infinite(uint32_t modifiers) {
  return modifiers != kDistance && (modifiers & (kBias | kDistance)) != 0;
}

// Writes lse for a warp's 16 rows, and computes the factors of their output, 0 for rows whose
// output must be 0.
template <uint32_t kModifiers>
__device__ __forceinline__ void finish_statistics(const ForwardPlan& plan, const QueryWork& work,
                                                  int warp_row, const OnlineSoftmax<1>& softmax,
                                                  float (&normalizer)[2]) {
  const int first_row = warp_row + fragment_row(0, 0);
  const int32_t row0 = work.row0, q_len = work.band.q_len;
  float* lse_gmem = work.lse + first_row * plan.lse.row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + first_row + 8 * half;
    float lse;
    RowStatistics<kModifiers>::finish(plan, work, half, row, softmax, lse, normalizer[half]);
    if constexpr (may_take_for_infinite(kModifiers)) {
      const bool low = lse == minus_infinity() && softmax.low[0][half];
      // In log2 units, far greater maxima are so imprecise that all exponentials may be 0.
      if (low || softmax.maximum[0][half] > plan.most_logit) lse = kLowLse;
    }
    if (row >= q_len) {
      lse = minus_infinity();
      normalizer[half] = 0.0f;
    }
    ptx::st_f32_if(threadIdx.x % 4 == 0 && row < plan.q_len, lse_gmem + 8 * half * plan.lse.row,
                   lse);
    if constexpr ((kModifiers & kDropout) != 0) normalizer[half] *= plan.dropout_scale;
  }
}

// Writes a warp's 16 rows of out, directly from registers: shared memory already receives the next
// tile's operands.
template <typename Config, typename Element, int kOutN>
__device__ __forceinline__ void store_out(const ForwardPlan& plan, const QueryWork& work,
                                          int warp_row, const float (&normalizer)[2],
                                          float (&out)[1][kOutN][4]) {
  if (__any_sync(0xffffffff, normalizer[0] == 0.0f || normalizer[1] == 0.0f)) {
#pragma unroll
    for (int n = 0; n < kOutN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (normalizer[e / 2] == 0.0f) out[0][n][e] = 0.0f;
      }
    }
  }
  store_rows(static_cast<Element*>(work.out) + warp_row * plan.out.row, plan.out.row,
             plan.q_len - work.row0 - warp_row, plan.value_dim, normalizer, out[0]);
}

template <typename Config, typename Element, uint32_t kModifiers, int kOutN>
__device__ __forceinline__ void finish_rows(const ForwardPlan& plan, const QueryWork& work,
                                            int warp_row, const OnlineSoftmax<1>& softmax,
                                            float (&out)[1][kOutN][4]) {
  float normalizer[2];
  finish_statistics<kModifiers>(plan, work, warp_row, softmax, normalizer);
  store_out<Config, Element>(plan, work, warp_row, normalizer, out);
}

// Writes out and lse for a warp's rows if they may attend to nothing.
template <typename Element>
__device__ __forceinline__ void finish_empty_rows(const ForwardPlan& plan, const QueryWork& work,
                                                  int warp_row) {
  const int lane = threadIdx.x % 32;
  Element* out_gmem = static_cast<Element*>(work.out);
  for (int row = warp_row; row < min(warp_row + 16, plan.q_len - work.row0); ++row) {
    if (lane == 0) {
      work.lse[row * plan.lse.row] =
          work.row0 + row < work.band.q_len ? work.sink_log2 * kLn2 : minus_infinity();
    }
    for (int col = lane * 8; col < plan.value_dim; col += 32 * 8) {
      *reinterpret_cast<uint4*>(out_gmem + row * plan.out.row + col) = uint4{};
    }
  }
}

}  // namespace jax_flash::sm90
