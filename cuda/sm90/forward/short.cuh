// Computes the forward pass of calls whose sequences are short, with head dims up to 64:
// S = Q K^T, P = 2^(scale log2(e) S - m) with m the row's greatest logit so far, out = P V /
// sum(P). One kernel is for calls without modifiers, one for calls with a mask of keys
// (sm90/key_mask.cuh), and one for calls with any modifiers, which it reads from global memory, one
// modifier after the other: the general kernel.
//
// In such a call, query tiles have few key tiles, and the start and end of a query tile take as
// long as its products. So a unit of work is up to kShortTiles tiles of 64 query rows of a head,
// and all keys and values of the head, which are copied once for all of these rows. Four
// warpgroups, three in the general kernel, compute tiles independently: while one starts or ends a
// tile, others multiply. Blocks are persistent, one for each multiprocessor, and copy units ahead.
//
// Warps: each warpgroup takes the next tile of rows when it has finished one; the longest tile of a
// unit comes first. One more warp describes units and starts their copies. Another one reads masks
// of keys, and clears values that no row may attend to. In the general kernel, all key tiles have
// 64 columns, in others, the last one has 16, 32, 48 or 64.
//
// Shared memory: a ring of units, each in rows of 128 bytes: Q | K | V, each padded to boxes of 16
// rows, in the general kernel K and V to 64. Products of the last tile of rows also read what
// follows Q, for rows that do not exist.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/logits.cuh"
#include "modifiers/scores.cuh"
#include "modifiers/sinks.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/divisor.h"
#include "plan/modifiers.h"
#include "plan/short.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/exact_maximum.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/fragments.cuh"
#include "sm90/key_mask.cuh"
#include "sm90/ring.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"
#include "wgmma.h"

namespace jax_flash::sm90 {

template <uint32_t kModifiers>
inline constexpr bool kShortGeneral = kModifiers == kEveryModifier;
template <uint32_t kModifiers>
inline constexpr bool kShortKeyMask = kModifiers == kMask;
// The number of computing warpgroups. Modifiers need registers.
template <uint32_t kModifiers>
inline constexpr int kShortGroups = kShortGeneral<kModifiers> ? 3 : 4;
template <uint32_t kModifiers>
inline constexpr int kShortComputing = kShortGroups<kModifiers> * kWarpgroup;
template <uint32_t kModifiers>
inline constexpr int kShortThreads = kShortComputing<kModifiers> + 2 * 32;
inline constexpr int kShortBoxBytes = kShortBoxRows * 128, kShortTileBytes = 64 * 128;
inline constexpr int kShortTileBoxes = 64 / kShortBoxRows;
inline constexpr int kShortWords = kShortTiles * 2;  // with a bit for each key

// Holds the parameters contiguously, for the same reason as ForwardPlan.
struct ShortCall {
  ForwardMaps maps;
  BoxAxes query, key, value;
  ForwardBand band;
  PlainDivisor parts, heads, group, inner_batch;  // parts: of the rows of a head
  PlainDivisor tiles, stages;                     // tiles: of rows in a part
  int32_t units;
  int32_t q_len, kv_len, value_dim;
  int32_t q_boxes, k_boxes;  // boxes of Q in a unit, and of K
  int32_t q_copy, k_copy;    // boxes of a copy
  int32_t unit_bytes;
  float to_log2;  // factor from the kernel's logits, natural or not, to log2 units
  RowsOperand out, lse, sinks;

  ShortCall(const Forward& params, const ShortUnits& of, bool natural_logits)
      : query(params.query),
        key(params.key),
        value(params.value),
        band(params),
        parts(of.parts),
        heads(params.shape.heads),
        group(params.shape.heads / params.shape.kv_heads),
        inner_batch(
            params.shape.num_batch_dims > 1 ? static_cast<int32_t>(params.shape.batch_dims[1]) : 1),
        tiles(of.tiles),
        stages(of.stages()),
        units(static_cast<int32_t>(of.units)),
        q_len(params.shape.q_len),
        kv_len(params.shape.kv_len),
        value_dim(params.shape.value_dim),
        q_boxes(of.q_boxes),
        k_boxes(of.k_boxes),
        q_copy(ShortUnits::boxes_of_copy(of.q_boxes)),
        k_copy(ShortUnits::boxes_of_copy(of.k_boxes)),
        unit_bytes(of.unit_bytes()),
        to_log2(natural_logits ? kLog2E : params.options.scale * kLog2E),
        out(params.out),
        lse(params.lse),
        sinks(params.sinks) {}
};

struct NoModifier {};
// A kernel's parameter for modifiers: the call, the mask of keys, or nothing.
template <uint32_t kModifiers>
using ShortModifiers =
    std::conditional_t<kShortGeneral<kModifiers>, Forward,
                       std::conditional_t<kShortKeyMask<kModifiers>, RowsOperand, NoModifier>>;

// Describes a unit: rows [row0, row_end) of a head.
struct ShortUnit {
  QueryTileIndex at;
  int32_t row0, row_end;
  Band band;
  Range attended;  // keys that some row may attend to
  float sink_log2;

  ShortUnit() = default;
  __device__ __forceinline__ ShortUnit(const ShortCall& call, int32_t index) {
    const int32_t batch_head = call.parts.quotient(index);
    at = place(call, batch_head);
    row0 = (index - batch_head * call.parts.divisor) * call.tiles.divisor * 64;
    row_end = min(row0 + call.tiles.divisor * 64, call.q_len);
    band = call.band.of<true>(at.batch_axes);
    attended = {0, 0};
    if (row0 < band.q_len) {
      attended = {band.first_col(row0), band.end_col(min(row_end, band.q_len) - 1)};
    }
    sink_log2 = read_sink(call.sinks.data != nullptr, call.sinks.at<const float>(at, 0));
  }

  static __device__ __forceinline__ QueryTileIndex place(const ShortCall& call,
                                                         int32_t batch_head) {
    QueryTileIndex at;
    at.batch = call.heads.quotient(batch_head);
    at.head = batch_head - at.batch * call.heads.divisor;
    at.kv_head = call.group.quotient(at.head);
    at.batch_axes[0] = call.inner_batch.quotient(at.batch);
    at.batch_axes[1] = at.batch - at.batch_axes[0] * call.inner_batch.divisor;
    return at;
  }

  __device__ __forceinline__ bool has_unattended(const ShortCall& call) const {
    return attended.first > 0 || attended.end < call.kv_len;
  }
};

// Holds a stage of the ring: the unit's description, and barriers.
struct ShortStage {
  ShortUnit unit;
  int32_t use;  // the number of units that the stage has had before
  // Barriers: Q and K have arrived; V has; V may be read, cleared if need be; nobody reads the
  // stage any more.
  uint64_t scored, valued, cleared, empty;
};

// Holds what a block keeps in shared memory beside the operands.
struct ShortShared {
  ShortStage stages[kShortStages];
  int32_t taken;                               // tiles of rows that warpgroups have begun
  int32_t next[2][kShortGroups<kNoModifier>];  // a warpgroup's next tile; two places, used in turn
};

// Holds masks of keys in shared memory: a bit for each key of each stage. A stage's bits are there
// when its values are cleared.
struct ShortKeyMasks {
  uint2 allowed[kShortStages][kShortTiles];
};
template <uint32_t kModifiers>
using ShortMasks = std::conditional_t<kShortKeyMask<kModifiers>, ShortKeyMasks, NoModifier>;

// Reads a head's mask of keys, with all lanes of a warp.
struct ShortMaskReader {
  uint32_t bytes[kShortWords];  // not compared yet, so that nothing waits for the loads

  // Starts to load the mask of a unit.
  __device__ __forceinline__ void load(const ShortCall& call, const RowsOperand& mask,
                                       int32_t unit) {
    if (unit >= call.units) return;
    const QueryTileIndex at = ShortUnit::place(call, call.parts.quotient(unit));
    const auto* keys = mask.at<const uint8_t>(at, 0);
#pragma unroll
    for (int i = 0; i < kShortWords; ++i) {
      const int32_t key = i * 32 + static_cast<int>(threadIdx.x) % 32;
      bytes[i] = key < call.kv_len ? keys[key * mask.row] : 0;
    }
  }
  // Returns 32 bits of it in each of the first kShortWords lanes.
  __device__ __forceinline__ uint32_t word() const {
    uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < kShortWords; ++i) {
      const uint32_t bits = __ballot_sync(0xffffffff, bytes[i] != 0);
      if (threadIdx.x % 32 == i) result = bits;
    }
    return result;
  }
};

// Gives the addresses of a stage's operands.
struct ShortOperands {
  using Tile = SmemTile<64, 64>;
  uint32_t root;                                 // of the ring
  uint32_t query_bytes, key_bytes, value_bytes;  // from the root

  __device__ __forceinline__ ShortOperands(uint32_t ring, const ShortCall& call, int32_t stage)
      : root(ring),
        query_bytes(stage * call.unit_bytes),
        key_bytes(query_bytes + call.q_boxes * kShortBoxBytes),
        value_bytes(key_bytes + call.k_boxes * kShortBoxBytes) {}
  __device__ __forceinline__ Tile query(int tile) const {
    return {root, query_bytes + tile * kShortTileBytes};
  }
  __device__ __forceinline__ Tile key(int tile) const {
    return {root, key_bytes + tile * kShortTileBytes};
  }
  __device__ __forceinline__ Tile value(int tile) const {
    return {root, value_bytes + tile * kShortTileBytes};
  }
};

// Describes the block's units and starts their copies. Called by one warp. Rows beyond an operand's
// end become zeros.
__device__ __forceinline__ void copy_short_units(const ShortCall& call, ShortShared& shared,
                                                 uint32_t ring) {
  const int lane = threadIdx.x % 32;
  int32_t stage = 0, use = 0;
  for (int32_t index = blockIdx.x; index < call.units; index += gridDim.x) {
    ShortStage& its = shared.stages[stage];
    const ShortUnit unit(call, index);
    const ShortOperands operands(ring, call, stage);
    const uint32_t scored = ptx::shared_address(&its.scored);
    const uint32_t valued = ptx::shared_address(&its.valued);
    ptx::mbarrier_wait_asleep(ptx::shared_address(&its.empty), ~use & 1);
    if (lane == 0) {
      its.unit = unit;
      *const_cast<volatile int32_t*>(&its.use) = use;
      ptx::mbarrier_arrive_expect_tx(scored, (call.q_boxes + call.k_boxes) * kShortBoxBytes);
      ptx::mbarrier_arrive_expect_tx(valued, call.k_boxes * kShortBoxBytes);
    }
    __syncwarp();
    const auto copy = [&](const CUtensorMap& map, const BoxAxes& axes, int32_t head, int32_t row0,
                          int32_t boxes, int32_t step, uint32_t bytes, uint32_t barrier) {
      for (int32_t box = lane * step; box < boxes; box += 32 * step) {
        load_box(ring + bytes + box * kShortBoxBytes, map, barrier, axes, unit.at.batch_axes, head,
                 row0 + box * kShortBoxRows, 0);
      }
    };
    copy(call.maps.key, call.key, unit.at.kv_head, 0, call.k_boxes, call.k_copy, operands.key_bytes,
         scored);
    copy(call.maps.query, call.query, unit.at.head, unit.row0, call.q_boxes, call.q_copy,
         operands.query_bytes, scored);
    copy(call.maps.value, call.value, unit.at.kv_head, 0, call.k_boxes, call.k_copy,
         operands.value_bytes, valued);
    if (++stage == call.stages.divisor) {
      stage = 0;
      ++use;
    }
  }
}

// Zeroes the rows of V that hold NaN or infinities and that masks or segments hide from every row
// of a unit. Called by one warp.
template <typename Element>
__device__ __forceinline__ void clear_hidden_values(const Forward& params, const ShortUnit& unit,
                                                    uint32_t values) {
  const int lane = threadIdx.x % 32;
  const auto is_bad = [&](int32_t chunk) {
    const uint4 words = ptx::ld_shared_v4(values + chunk * 16);
    return not_finite<Element>(words.x) | not_finite<Element>(words.y) |
           not_finite<Element>(words.z) | not_finite<Element>(words.w);
  };
  const int32_t first = unit.attended.first, end = unit.attended.end;
  uint32_t bad = 0;
#pragma unroll 8
  for (int32_t chunk = first * 8 + lane; chunk < end * 8; chunk += 32) bad |= is_bad(chunk);
  if (!__any_sync(0xffffffff, bad != 0)) [[likely]] {
    return;
  }
  const LogitModifiers modifiers(params, BatchIndex(unit.at.batch_axes), unit.at.head);
  for (int32_t col = first; col < end; ++col) {
    if (!__any_sync(0xffffffff, is_bad(col * 8 + lane % 8) != 0)) continue;
    bool allowed = false;
    for (int32_t row = unit.row0 + lane; row < unit.row_end; row += 32) {
      allowed = allowed || modifiers.allows(unit.band, row, col);
    }
    if (__any_sync(0xffffffff, allowed)) continue;
    if (lane < 8) ptx::st_shared_v4(values + (col * 8 + lane) * 16, uint4{});
  }
}

// Returns a bit for each of 32 keys from `first` on, set if a range has the key.
__device__ __forceinline__ uint32_t bits_of(const Range& range, int32_t first) {
  const int32_t begin = min(max(range.first - first, 0), 32), end = range.end - first;
  return static_cast<uint32_t>((uint64_t{1} << min(max(end, begin), 32)) - (uint64_t{1} << begin));
}

// Zeroes the rows of V that have no bit. Each lane of the calling warp has those of 32 rows.
__device__ __forceinline__ void clear_rows(const ShortCall& call, uint32_t word, uint32_t values) {
  const int lane = threadIdx.x % 32, rows = call.k_boxes * kShortBoxRows;
  for (int row0 = 0; row0 < rows; row0 += 32) {
    const uint32_t bits = __shfl_sync(0xffffffff, word, row0 / 32);
    if (bits == ~0u) continue;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const int row = i + lane / 8;
      if (bits >> row & 1 || row0 + row >= rows) continue;
      ptx::st_shared_v4(values + (row0 + row) * 128 + lane % 8 * 16, uint4{});
    }
  }
}

// Zeroes values that no row of a unit may attend to: they may hold NaN, and a product of NaN with a
// probability of 0 is NaN. Describes masks of keys. Called by one warp.
template <typename Element, uint32_t kModifiers>
__device__ __forceinline__ void clear_short_units(const ShortCall& call,
                                                  const ShortModifiers<kModifiers>& modifiers,
                                                  ShortShared& shared,
                                                  ShortMasks<kModifiers>& masks, uint32_t ring) {
  const int lane = threadIdx.x % 32;
  int32_t stage = 0;
  uint32_t parity = 0;
  ShortMaskReader next;
  if constexpr (kShortKeyMask<kModifiers>) next.load(call, modifiers, blockIdx.x);
  for (int32_t index = blockIdx.x; index < call.units; index += gridDim.x) {
    ShortStage& its = shared.stages[stage];
    uint32_t word = ~0u;
    if constexpr (kShortKeyMask<kModifiers>) {
      word = next.word();
      next.load(call, modifiers, index + gridDim.x);
    }
    ptx::mbarrier_wait_asleep(ptx::shared_address(&its.scored), parity);
    if constexpr (kShortKeyMask<kModifiers>) {
      if (lane < kShortWords) reinterpret_cast<uint32_t*>(masks.allowed[stage])[lane] = word;
    }
    ptx::mbarrier_wait_asleep(ptx::shared_address(&its.valued), parity);
    const uint32_t values = ring + ShortOperands(ring, call, stage).value_bytes;
    bool clears = kShortKeyMask<kModifiers> || its.unit.has_unattended(call);
    if (clears) clear_rows(call, word & bits_of(its.unit.attended, lane * 32), values);
    if constexpr (kShortGeneral<kModifiers>) {
      if (has_element_masks<kModifiers>(modifiers)) {
        clear_hidden_values<Element>(modifiers, its.unit, values);
        clears = true;
      }
    }
    if (clears) ptx::fence_proxy_async_shared();
    sync_and_arrive_warp(ptx::shared_address(&its.cleared));
    arrive_warp(ptx::shared_address(&its.empty));
    if (++stage == call.stages.divisor) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Holds the state of a tile of 64 rows.
template <typename Element, uint32_t kModifiers>
struct ShortRows {
  static constexpr int kOutN = 64 / 8;

  const ShortCall& call;
  const ShortModifiers<kModifiers>& modifiers;
  const ShortMasks<kModifiers>& masks;
  const int32_t stage;
  const QueryTileIndex& at;
  const ShortOperands& operands;
  const Band& band;
  const int32_t row0;
  const uint32_t cleared, parity;  // the barrier for values
  OnlineSoftmax<1> softmax;
  float out[1][kOutN][4] = {};

  // Adds kN keys of a tile.
  template <int kN>
  __device__ __forceinline__ void add(const ShortOperands::Tile& query, int32_t tile) {
    float scores[1][kN / 8][4];
    forget(scores[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<Element, kN>::template ss<0, 0>(scores[0], operand_k_major(query, 0, k),
                                                 operand_k_major(operands.key(tile), 0, k), k > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(scores[0]);
    const int32_t col0 = tile * 64;
    float least = minus_infinity();
    if constexpr (kShortGeneral<kModifiers>) {
      modify_scores<kModifiers>(scores, modifiers,
                                ModifierOffsets(modifiers, at.batch_axes, at.head), band,
                                row0 + warp_row(), col0, false);
      if (adds_to_logits(modifiers)) least = kLeastLogit;
    }
    if (!band.all_allowed(row0, min(row0 + 64, band.q_len), col0, col0 + kN)) {
      mask_band(scores, band, row0 + warp_row(), col0);
    }
    if constexpr (kShortKeyMask<kModifiers>) {
      const uint2 allowed = masks.allowed[stage][tile];
      if ((allowed.x & allowed.y) != ~0u) forbid_keys(scores, allowed);
    }
    float factor[1][2], shift[2];
    if (raise_maxima<false, false>(softmax, scores, call.to_log2, factor, least)) {
      OnlineSoftmax<1>::rescale(out, factor);
    }
    find_shift<true, 0>(softmax, call.to_log2, shift);
    exponentials_in_chains(softmax, scores, call.to_log2, shift);
    if constexpr (kShortGeneral<kModifiers>) {
      if (modifiers.options.dropout_threshold != 0) {
        const Dropout dropout = ModifierOffsets::dropout_of(modifiers, at.batch_axes, at.head);
        drop(scores, dropout.kept<kN / 8, false>(modifiers.options.dropout_threshold,
                                                 row0 + warp_row(), col0));
      }
    }
    uint32_t rounded[kN / 16][4];
    round_fragments<Element>(rounded, scores[0]);
    ptx::mbarrier_wait(cleared, parity);
    ptx::wgmma_results(out[0]);  // the rescaling must not move past the fence
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      ptx::Wgmma<Element, 64>::template rs<1>(out[0], rounded[k],
                                              operand_mn_major(operands.value(tile), 0, k), 1);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(out[0]);
  }

  __device__ __forceinline__ void attend(const ShortOperands::Tile& query) {
    const Range keys = kv_tiles<64>(band, row0, row0 + 64);
    if constexpr (kShortKeyMask<kModifiers>) ptx::mbarrier_wait(cleared, parity);
    for (int32_t tile = keys.first; tile < keys.end; ++tile) {
      if constexpr (kShortKeyMask<kModifiers>) {
        const uint2 allowed = masks.allowed[stage][tile];
        if ((allowed.x | allowed.y) == 0) continue;
      }
      if constexpr (kShortGeneral<kModifiers>) {  // one copy of the code, which is long
        add<64>(query, tile);
        continue;
      }
      switch (min(call.k_boxes - tile * kShortTileBoxes, kShortTileBoxes)) {
        case 4: add<64>(query, tile); break;
        case 3: add<48>(query, tile); break;
        case 2: add<32>(query, tile); break;
        default: add<16>(query, tile);
      }
    }
  }

  // Divides by the sums, and stores.
  __device__ __forceinline__ void finish(float sink_log2) {
    const int32_t first = row0 + warp_row() + fragment_row(0, 0);
    float* lse_gmem = call.lse.at<float>(at, first);
    float normalizer[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first + 8 * half;
      float lse;
      softmax.finish(0, half, call.to_log2, sink_log2, lse, normalizer[half]);
      if constexpr (kShortGeneral<kModifiers>) {
        // As in finish_statistics().
        const bool low = lse == minus_infinity() && softmax.low[0][half];
        const bool great = adds_to_logits(modifiers) && softmax.maximum[0][half] > kExtremeLse;
        if (low || great) lse = kLowLse;
        normalizer[half] *= modifiers.options.dropout_scale;
      }
      if (row >= band.q_len) {
        lse = minus_infinity();
        normalizer[half] = 0.0f;
      }
      ptx::st_f32_if(threadIdx.x % 4 == 0 && row < call.q_len, lse_gmem + 8 * half * call.lse.row,
                     lse);
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          if (normalizer[half] == 0.0f) out[0][n][e] = 0.0f;
        }
      }
    }
    store_rows(call.out.at<Element>(at, row0 + warp_row()), call.out.row,
               call.q_len - row0 - warp_row(), call.value_dim, normalizer, out[0]);
  }

  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
  }
};

// Computes tiles of rows until none is left. Called by a warpgroup.
template <typename Element, uint32_t kModifiers>
__device__ __forceinline__ void compute_short_units(const ShortCall& call,
                                                    const ShortModifiers<kModifiers>& modifiers,
                                                    ShortShared& shared,
                                                    const ShortMasks<kModifiers>& masks,
                                                    uint32_t ring, int group) {
  const int32_t tiles = call.tiles.divisor;
  const int32_t units = (call.units - 1 - static_cast<int32_t>(blockIdx.x)) / gridDim.x + 1;
  int32_t item = group;
  for (int turn = 0;; turn ^= 1) {
    const int32_t index = call.tiles.quotient(item);
    if (index >= units) break;
    const int32_t tile = tiles - 1 - (item - index * tiles), use = call.stages.quotient(index);
    const int32_t stage = index - use * call.stages.divisor;
    int32_t next = 0;
    if (threadIdx.x % kWarpgroup == 0) next = atomicAdd(&shared.taken, 1);
    ShortStage& its = shared.stages[stage];
    const uint32_t parity = use & 1;
    // The barrier tells a phase only from its neighbours, and two units may use the stage before
    // this one.
    while (*const_cast<const volatile int32_t*>(&its.use) != use) {
    }
    ptx::mbarrier_wait(ptx::shared_address(&its.scored), parity);
    const ShortUnit& unit = its.unit;
    const Band band = unit.band;
    const QueryTileIndex at = unit.at;
    const float sink_log2 = unit.sink_log2;
    const int32_t row0 = unit.row0 + tile * 64;
    const bool exists = row0 < unit.row_end;
    const ShortOperands operands(ring, call, stage);
    const uint32_t cleared = ptx::shared_address(&its.cleared);
    ShortRows<Element, kModifiers> rows{call,     modifiers, masks, stage,   at,
                                        operands, band,      row0,  cleared, parity};
    if (exists) rows.attend(operands.query(tile));
    sync_and_arrive_warp(ptx::shared_address(&its.empty));
    if (exists) rows.finish(sink_log2);
    if (threadIdx.x % kWarpgroup == 0) shared.next[turn][group] = next;
    ptx::barrier_sync(1 + group, kWarpgroup);
    item = *const_cast<const volatile int32_t*>(&shared.next[turn][group]);
  }
}

template <typename Element, uint32_t kModifiers>
__global__ void __launch_bounds__(kShortThreads<kModifiers>, 1)
    forward_short_kernel(const __grid_constant__ ShortCall call,
                         const __grid_constant__ ShortModifiers<kModifiers> modifiers) {
  extern __shared__ __align__(1024) uint8_t ring_smem[];
  __shared__ __align__(16) uint8_t shared_bytes[sizeof(ShortShared)];
  __shared__ ShortMasks<kModifiers> masks;
  ShortShared& shared = *reinterpret_cast<ShortShared*>(shared_bytes);
  const uint32_t ring = ptx::shared_address(ring_smem);
  if (threadIdx.x < call.stages.divisor) {
    ShortStage& stage = shared.stages[threadIdx.x];
    stage.use = 0;
    ptx::mbarrier_init(ptx::shared_address(&stage.scored), 1);
    ptx::mbarrier_init(ptx::shared_address(&stage.valued), 1);
    ptx::mbarrier_init(ptx::shared_address(&stage.cleared), kWarpArrivals);
    // The warps of all tiles, and the one that clears.
    ptx::mbarrier_init(ptx::shared_address(&stage.empty),
                       (call.tiles.divisor * 4 + 1) * kWarpArrivals);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == 0) shared.taken = kShortGroups<kModifiers>;
  __syncthreads();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == kShortComputing<kModifiers> / 32) {
    copy_short_units(call, shared, ring);
  } else if (warp > kShortComputing<kModifiers> / 32) {
    clear_short_units<Element, kModifiers>(call, modifiers, shared, masks, ring);
  } else {
    compute_short_units<Element, kModifiers>(call, modifiers, shared, masks, ring, warp / 4);
  }
}

template <typename Element, uint32_t kModifiers>
Status launch_forward_short(const Forward& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  const ShortUnits units(shape, kShortGeneral<kModifiers>);
  ShortCall call(params, units, kShortGeneral<kModifiers> && has_natural_logits(params));
  ShortModifiers<kModifiers> modifiers;
  if constexpr (kShortGeneral<kModifiers>) modifiers = params;
  if constexpr (kShortKeyMask<kModifiers>) modifiers = key_mask_of(params);
  Status status = make_forward_maps(params, call.q_copy * kShortBoxRows,
                                    call.k_copy * kShortBoxRows, call.maps);
  if (!status.ok()) return status;
  int sms = 0;
  if (status = multiprocessors(sms); !status.ok()) return status;
  return launch_kernel(
      "sm90::forward_short_kernel", shape, forward_short_kernel<Element, kModifiers>,
      std::min<int64_t>(units.units, sms), kShortThreads<kModifiers>,
      units.stages() * units.unit_bytes() + kShortSlackBytes, stream, call, modifiers);
}

}  // namespace jax_flash::sm90
