// Computes the backward pass of calls of many short sequences, without grouped heads, with head
// dims up to 64. With lse in log2 units:
//
//   S = Q K^T,  dP = dO V^T,  P = 2^(scale log2(e) S - lse),  dS = P (dP - delta)
//   dQ = dS K,  dV = P^T dO,  dK = dS^T Q,  delta = sum(dO * O) - dlse
//
// One kernel is for calls without modifiers, one for calls with a mask of keys (sm90/key_mask.cuh),
// and one for calls with any modifiers (kGeneral), which it reads from global memory, one modifier
// after the other. If a head has one tile of queries and one of keys, the latter also computes the
// gradient of a bias: a block then takes heads that add to the same tile of it, and keeps their sum
// in registers (see modifiers/bias_gradient.cuh).
//
// A unit of work is a head. Its operands fit a block's shared memory, so dQ needs no sums in global
// memory. No kernels run before and after this one, except for gradients of modifiers. Results do
// not depend on any order of blocks. Blocks are persistent. All tiles of a head are computed, also
// those whose queries and keys have no segment in common.
//
// Each warpgroup has a tile of 64 query rows, and keeps dQ of it in registers. All warpgroups go
// through the tiles of 64 keys in turn. P and dS of a key tile and all query rows go to shared
// memory. From there, one warpgroup computes the tile's dV, and the next one its dK; other
// warpgroups do so for other tiles. A warpgroup copies its tiles of the next unit's operands as
// soon as nobody reads those that they replace.
//
// Shared memory, in tiles of 64 rows: K | V | Q | dO | one or two buffers of P | dS.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/bias_gradient.cuh"
#include "modifiers/score_gradient.cuh"
#include "modifiers/scores.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/divisor.h"
#include "plan/short.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/schedule.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/fragments.cuh"
#include "sm90/key_mask.cuh"
#include "sm90/ring.cuh"
#include "status.h"
#include "tile/bad_key_rows.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/chunk.cuh"
#include "tile/launch.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"
#include "wgmma.h"

namespace jax_flash::sm90 {

// kTileCount: the most tiles of 64 query rows, and of 64 keys, of a head.
template <int kTileCount, uint32_t kModifiers>
struct ShortGradientConfig {
  using Tile = SmemTile<64, 64>;
  static constexpr int kTiles = kTileCount, kThreads = kTiles * kWarpgroup;
  static constexpr bool kGeneral = kModifiers == kEveryModifier;
  static constexpr bool kHasKeyMask = kModifiers == kMask;
  static constexpr bool kSumsBias = kGeneral && kTiles == 1;  // computes the gradient of a bias
  // On each multiprocessor. The sums of a bias's gradient need registers.
  static constexpr int kBlocks = kSumsBias ? 3 : kTiles == 1 ? 4 : kTiles == 2 ? 2 : 1;
  static constexpr int kBuffers = kTiles == 3 ? 2 : 1;  // as there is room
  static constexpr int kSmemBytes = (4 + 2 * kBuffers) * kTiles * Tile::kBytes;
};

// Holds the parameters of a call.
struct ShortGradientCall {
  BackwardMaps maps;
  BoxAxes query, key, value, dout;
  ForwardBand band;
  HeadDivisors heads;
  int32_t units, q_tiles, k_tiles;
  int32_t q_len, kv_len, head_dim, value_dim;
  float to_log2;
  float dscore_scale, sum_scale;  // factors of dP and delta, and of the sums for dQ and dK
  RowsOperand out, lse, dlse, dquery, dkey, dvalue;

  ShortGradientCall(const Backward& params, bool scales_dscores)
      : query(params.query),
        key(params.key),
        value(params.value),
        dout(params.dout),
        band(params),
        heads(params.shape, params.shape.heads),
        units(static_cast<int32_t>(params.shape.batch * params.shape.heads)),
        q_tiles(static_cast<int32_t>(ceil_div(params.shape.q_len, 64))),
        k_tiles(static_cast<int32_t>(ceil_div(params.shape.kv_len, 64))),
        q_len(params.shape.q_len),
        kv_len(params.shape.kv_len),
        head_dim(params.shape.head_dim),
        value_dim(params.shape.value_dim),
        to_log2(params.options.scale * kLog2E),
        dscore_scale(scales_dscores ? params.options.scale : 1.0f),
        sum_scale(scales_dscores ? 1.0f : params.options.scale),
        out(params.out),
        lse(params.lse),
        dlse(params.dlse),
        dquery(params.dquery),
        dkey(params.dkey),
        dvalue(params.dvalue) {}
};

// The most blocks that divide the heads of a call, if they sum up the gradient of a bias: as many
// as run at the same time. A constant, so that results do not depend on the GPU's.
inline constexpr int kShortBiasBlocks = 384;

// Holds what a kernel for any modifiers reads besides.
struct ShortGradientModifiers {
  Backward params;  // if sums_bias, dbias is the array of the parts
  BackwardWorkspace workspace;
  BiasOwnership ownership;
  BiasParts parts;
  bool sums_bias;
  // True if lse and delta of rows are stored to the workspace, for the gradients of a bias, slopes
  // or a relative bias, which other kernels compute.
  bool stores_statistics;
};
struct NoModifiers {};

// Lists the units of a block: those with the numbers `first`, `first` + `step` and so on.
struct ShortGradientWalk {
  int32_t first, end, step;

  __device__ __forceinline__ explicit ShortGradientWalk(const ShortGradientCall& call)
      : first(blockIdx.x), end(call.units), step(gridDim.x) {}
  __device__ __forceinline__ int32_t unit(const ShortGradientCall&, int32_t number) const {
    return number;
  }
};

// Lists the units that add to the block's part of a tile of dbias, if there is one.
struct ShortBiasWalk : ShortGradientWalk {
  bool sums_bias, owns_head, owns_axis[kTensorMapBatchDims];
  BiasTileIndex own;

  __device__ __forceinline__ ShortBiasWalk(const ShortGradientCall& call,
                                           const ShortGradientModifiers& modifiers)
      : ShortGradientWalk(call),
        sums_bias(modifiers.sums_bias),
        owns_head(modifiers.params.dbias.head != 0),
        owns_axis{modifiers.params.dbias.batch[0] != 0, modifiers.params.dbias.batch[1] != 0},
        own(modifiers.ownership, blockIdx.x / modifiers.parts.parts) {
    if (!sums_bias) return;
    const auto terms = static_cast<int32_t>(modifiers.parts.terms);
    first = static_cast<int32_t>(blockIdx.x % modifiers.parts.parts) * terms;
    end = min(first + terms, static_cast<int32_t>(modifiers.ownership.summed_tiles()));
    step = 1;
  }
  __device__ __forceinline__ int32_t unit(const ShortGradientCall& call, int32_t number) const {
    if (!sums_bias) return number;
    const Divisor& heads = call.heads.heads;
    const auto owned = static_cast<int32_t>(own.batch);
    int32_t head = own.head, summed = number;
    if (!owns_head) {
      summed = heads.quotient(number);
      head = number - summed * heads.divisor;
    }
    const Divisor& inner = call.heads.inner_batch;
    const int32_t last = owns_axis[1] ? owned : summed, rest = inner.quotient(last);
    const int32_t first_axis = owns_axis[0] == owns_axis[1] ? rest : owns_axis[0] ? owned : summed;
    const int32_t batch = first_axis * inner.divisor + last - rest * inner.divisor;
    return batch * heads.divisor + head;
  }
};

struct ShortGradientUnit {
  int32_t index;
  HeadIndex at;
  Band band;

  __device__ __forceinline__ ShortGradientUnit(const ShortGradientCall& call, int32_t unit)
      : index(unit), at(call.heads.at(unit)), band(call.band.of<true>(at.batch_axes)) {}

  // Returns the key tiles that some row of a tile of query rows may attend to.
  __device__ __forceinline__ Range attended(int32_t q_tile) const {
    return kv_tiles<64>(band, q_tile * 64, q_tile * 64 + 64);
  }
};

// Holds barriers in shared memory, by tile. Each has one phase in a unit; those for copies only if
// their tile exists.
template <typename Config>
struct ShortGradientBarriers {
  uint64_t queries[Config::kTiles], keys[Config::kTiles];  // Q and dO, K and V have arrived
  // For each key tile: all P and dS are stored, and nobody reads its K and V any more; dV and
  // dK are computed.
  uint64_t scored[Config::kTiles], summed[Config::kTiles];
};

// Holds, for each tile of keys, the rows that are NaN or infinite: see clear_bad_keys().
template <typename Config>
struct ShortBadKeys {
  uint32_t bad[Config::kTiles][Config::Tile::kRows / 32 + 1];
};
// Holds a mask of keys: a bit for each row of each tile.
template <typename Config>
struct ShortAllowedKeys {
  uint2 allowed[Config::kTiles];
};

// The gradients that are sums over query rows: dV, of P, and dK, of dS.
enum class ShortGradient { kValue, kKey };

// Gives the addresses of the tiles.
template <typename Config>
struct ShortGradientTiles {
  using Tile = typename Config::Tile;
  uint32_t root;

  __device__ __forceinline__ Tile at(int kind, int tile) const {
    return {root, static_cast<uint32_t>((kind * Config::kTiles + tile) * Tile::kBytes)};
  }
  __device__ __forceinline__ Tile key(int tile) const { return at(0, tile); }
  __device__ __forceinline__ Tile value(int tile) const { return at(1, tile); }
  __device__ __forceinline__ Tile query(int tile) const { return at(2, tile); }
  __device__ __forceinline__ Tile dout(int tile) const { return at(3, tile); }
  // P of a tile of query rows and a key tile, or dS.
  __device__ __forceinline__ Tile scores(int q_tile, int k_tile, ShortGradient of) const {
    return at(4 + k_tile % Config::kBuffers * 2 + (of == ShortGradient::kKey ? 1 : 0), q_tile);
  }
};

__device__ __forceinline__ void wait_short(uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive_short(uint64_t& barrier) {
  sync_and_arrive_warp(ptx::shared_address(&barrier));
}

// Computes the gradients of units. Called by a warpgroup, whose tiles of the operands have the
// index `group`.
template <typename Config, typename Element>
struct ShortGradientGroup {
  static constexpr bool kGeneral = Config::kGeneral;
  static constexpr bool kHasKeyMask = Config::kHasKeyMask;
  // The parameter for modifiers: a mask of keys, or more.
  using Modifiers = std::conditional_t<kGeneral, ShortGradientModifiers,
                                       std::conditional_t<kHasKeyMask, RowsOperand, NoModifiers>>;
  using Keys =
      std::conditional_t<kGeneral, ShortBadKeys<Config>,
                         std::conditional_t<kHasKeyMask, ShortAllowedKeys<Config>, NoModifiers>>;
  using Walk = std::conditional_t<Config::kSumsBias, ShortBiasWalk, ShortGradientWalk>;
  using BiasSums = std::conditional_t<Config::kSumsBias, float[1][8][4], NoModifiers>;
  using Tile = typename Config::Tile;
  using Sums = float[8][4];
  using Scores = float[1][4][4];  // 64 rows by 32 keys, of the warpgroup
  using Rounded = uint32_t[2][4];
  // Holds a thread's parts of two rows of the output, and the rows' lse and its gradient. With a
  // mask of keys, also the byte of the thread's key.
  struct RowParts {
    uint4 out[2][2];
    float lse[2], dlse[2];
    uint32_t allowed;
  };

  const ShortGradientCall& call;
  const Modifiers& modifiers;
  ShortGradientBarriers<Config>& barriers;
  Keys& keys;
  const ShortGradientTiles<Config>& tiles;
  const int group;
  const Walk walk;

  __device__ __forceinline__ static int warp_row() {
    return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
  }

  __device__ __forceinline__ void run() const {
    uint32_t parity = 0;
    copy_queries(walk.first);
    copy_keys(walk.first);
    RowParts rows = load_rows(walk.first);
    BiasSums dbias;
    if constexpr (Config::kSumsBias) clear(dbias[0]);
    for (int32_t number = walk.first; number < walk.end; number += walk.step, parity ^= 1) {
      const ShortGradientUnit unit(call, walk.unit(call, number));
      const int32_t row0 = group * 64, next = number + walk.step;
      const Range attended = unit.attended(group);
      Sums dquery;
      clear(dquery);
      float lse[2] = {}, delta[2] = {};
      clear_unattended(unit.band, parity);
      if constexpr (kHasKeyMask) share_key_mask(rows.allowed != 0, parity);
      if constexpr (kGeneral) clear_bad_tile(parity);
      if constexpr (kGeneral) store_padding(unit);
      if (group < call.q_tiles) find_statistics(unit, rows, parity, lse, delta);
#pragma unroll 1
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        if (attends(attended, tile)) {
          wait_short(barriers.keys[tile], parity);
          add(dquery, dbias, unit, row0, tile, lse, delta, parity);
        }
        arrive_short(barriers.scored[tile]);
        const bool finds_dvalue = tile == group, finds_dkey = (tile + 1) % Config::kTiles == group;
        if (finds_dvalue || finds_dkey) wait_short(barriers.scored[tile], parity);
        if (finds_dvalue) copy_keys(next);
        // One loop, so that there is one copy of the code, and registers suffice.
#pragma unroll 1
        for (int of = finds_dvalue ? 0 : 1; of < (finds_dkey ? 2 : 1); ++of) {
          find_key_gradient(unit, tile, static_cast<ShortGradient>(of));
        }
      }
      rows = load_rows(next);  // early, since they take long
      for (int tile = 0; tile < Config::kTiles; ++tile) wait_short(barriers.summed[tile], parity);
      copy_queries(next);
      if (group < call.q_tiles) {
        const int32_t row = row0 + warp_row();
        store_rows(call.dquery.at<Element>(unit.at, row), call.dquery.row, call.q_len - row,
                   call.head_dim, call.sum_scale, dquery);
      }
    }
    if constexpr (Config::kSumsBias) {
      if (!walk.sums_bias) return;
      const int32_t part = blockIdx.x % modifiers.parts.parts;
      store_bias_tile(modifiers.params, walk.own, part * modifiers.parts.elements, dbias);
    }
  }

  // Start the copies of the warpgroup's tiles: of K and V; of Q and dO. `number`: a unit's number
  // in the block's list.
  __device__ __forceinline__ void copy_keys(int32_t number) const {
    if (threadIdx.x % kWarpgroup != 0 || number >= walk.end || group >= call.k_tiles) return;
    const HeadIndex at = call.heads.at(walk.unit(call, number));
    ptx::fence_proxy_async_shared();
    const uint32_t barrier = ptx::shared_address(&barriers.keys[group]);
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * Tile::kBytes);
    copy(tiles.key(group), call.maps.key, call.key, barrier, at);
    copy(tiles.value(group), call.maps.value, call.value, barrier, at);
  }
  __device__ __forceinline__ void copy_queries(int32_t number) const {
    if (threadIdx.x % kWarpgroup != 0 || number >= walk.end || group >= call.q_tiles) return;
    const HeadIndex at = call.heads.at(walk.unit(call, number));
    ptx::fence_proxy_async_shared();
    const uint32_t barrier = ptx::shared_address(&barriers.queries[group]);
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * Tile::kBytes);
    copy(tiles.query(group), call.maps.query, call.query, barrier, at);
    copy(tiles.dout(group), call.maps.dout, call.dout, barrier, at);
  }
  __device__ __forceinline__ void copy(const Tile& to, const CUtensorMap& map, const BoxAxes& axes,
                                       uint32_t barrier, const HeadIndex& at) const {
    load_box(to.root + to.offset, map, barrier, axes, at.batch_axes, at.head, group * 64, 0);
  }

  // Zeroes rows of keys that no query may attend to, and query rows beyond the length: they may
  // hold NaN, and NaN times 0 is NaN.
  __device__ __forceinline__ void clear_unattended(const Band& band, uint32_t parity) const {
    const int32_t first = max(0, band.lo), end = min(band.kv_len, band.q_len - 1 + band.hi);
    if (first <= 0 && end >= call.kv_len && band.q_len == call.q_len) return;
    if (group < call.k_tiles) {
      wait_short(barriers.keys[group], parity);
      clear_rows(tiles.key(group), first, end);
      clear_rows(tiles.value(group), first, end);
    }
    if (group < call.q_tiles) {
      wait_short(barriers.queries[group], parity);
      clear_rows(tiles.query(group), 0, band.q_len);
      clear_rows(tiles.dout(group), 0, band.q_len);
    }
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }
  // Zeroes rows outside [first, end).
  __device__ __forceinline__ void clear_rows(const Tile& tile, int32_t first, int32_t end) const {
    for (int chunk = threadIdx.x % kWarpgroup; chunk < Tile::kBytes / 16; chunk += kWarpgroup) {
      const int32_t row = group * 64 + chunk / 8;
      if (row < first || row >= end) {
        ptx::st_shared_v4(tile.root + tile.offset + chunk * 16, uint4{});
      }
    }
  }

  // Tells all warpgroups which keys of this one's tile the mask allows, and zeroes the others.
  // `allowed`: of the thread's key.
  __device__ __forceinline__ void share_key_mask(bool allowed, uint32_t parity) const {
    const int thread = threadIdx.x % kWarpgroup;
    const uint32_t word = __ballot_sync(0xffffffff, allowed);
    if (group < call.k_tiles) {
      if (thread == 0) keys.allowed[group].x = word;
      if (thread == 32) keys.allowed[group].y = word;
      wait_short(barriers.keys[group], parity);
      if (!allowed && thread < Tile::kRows) {
        clear_row(tiles.key(group), thread, 0, 1);
        clear_row(tiles.value(group), thread, 0, 1);
      }
    }
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }
  // Returns whether queries may attend to a key of a tile, if they may attend to these tiles but
  // for the mask of keys.
  __device__ __forceinline__ bool attends(const Range& attended, int tile) const {
    if (tile < attended.first || tile >= attended.end) return false;
    if constexpr (kHasKeyMask) return (keys.allowed[tile].x | keys.allowed[tile].y) != 0;
    return true;
  }
  // Zeroes a row of a tile: chunks `first`, `first` + `step` and so on.
  static __device__ __forceinline__ void clear_row(const Tile& tile, int row, int first, int step) {
    for (int chunk = first; chunk < 8; chunk += step) {
      ptx::st_shared_v4(tile.address(row, chunk), uint4{});
    }
  }

  // Zeroes keys that are NaN or infinite, for the reason that clear_bad_keys() states.
  __device__ __forceinline__ void clear_bad_tile(uint32_t parity) const {
    if (group < call.k_tiles) {
      wait_short(barriers.keys[group], parity);
      clear_bad_key_rows<kWarpgroup, Element>(tiles.key(group), keys.bad[group],
                                              threadIdx.x % kWarpgroup, 1 + group);
    }
    if (Config::kTiles > 1) __syncthreads();
  }

  // Loads what find_statistics() needs of global memory, for the thread's rows of a unit.
  __device__ __forceinline__ RowParts load_rows(int32_t number) const {
    RowParts rows = {};
    rows.lse[0] = rows.lse[1] = minus_infinity();
    if (number >= walk.end) return rows;
    const ShortGradientUnit unit(call, walk.unit(call, number));
    if constexpr (kHasKeyMask) {
      const int32_t thread = threadIdx.x % kWarpgroup, key = group * 64 + thread;
      if (thread < 64 && key < call.kv_len) {
        rows.allowed = *modifiers.template at<const uint8_t>(unit.at, key);
      }
    }
    if (group >= call.q_tiles) return rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = group * 64 + warp_row() + fragment_row(0, 2 * half);
      if (row >= unit.band.q_len) continue;
      rows.lse[half] = *call.lse.at<const float>(unit.at, row);
      if (call.dlse.data) rows.dlse[half] = *call.dlse.at<const float>(unit.at, row);
      const Element* out = call.out.at<const Element>(unit.at, row);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int col = (part * 4 + threadIdx.x % 4) * kChunk;
        if (col < call.value_dim) {
          rows.out[half][part] = *reinterpret_cast<const uint4*>(out + col);
        }
      }
    }
    return rows;
  }
  // Finds lse, in the units of the logits, and delta of the thread's rows. The lanes of a quad
  // share two rows.
  __device__ __forceinline__ void find_statistics(const ShortGradientUnit& unit,
                                                  const RowParts& rows, uint32_t parity,
                                                  float (&lse)[2], float (&delta)[2]) const {
    const int lane = threadIdx.x % 4;
    wait_short(barriers.queries[group], parity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row() + fragment_row(0, 2 * half);
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 dout = ptx::ld_shared_v4(tiles.dout(group).address(row, part * 4 + lane));
        const Element* a = reinterpret_cast<const Element*>(&rows.out[half][part]);
        const Element* b = reinterpret_cast<const Element*>(&dout);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sum = fmaf(static_cast<float>(a[e]), static_cast<float>(b[e]), sum);
        }
      }
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const bool dead = rows.lse[half] == minus_infinity();
      delta[half] = dead ? 0.0f : sum - rows.dlse[half];
      lse[half] = dead ? -minus_infinity() : rows.lse[half];
      if constexpr (!kGeneral) delta[half] *= call.dscore_scale;
      if (!kGeneral || !natural_units()) lse[half] *= kLog2E;
      if constexpr (kGeneral || kHasKeyMask) {
        if (dead) {  // Q and dO may hold NaN
          clear_row(tiles.query(group), row, lane, 4);
          clear_row(tiles.dout(group), row, lane, 4);
        }
      }
      if constexpr (kGeneral) store_statistics(unit, group * 64 + row, lse[half], delta[half]);
    }
    if constexpr (kGeneral || kHasKeyMask) ptx::fence_proxy_async_shared();
  }
  __device__ __forceinline__ bool natural_units() const {
    if constexpr (kGeneral) return in_natural_units(modifiers.params);
    return false;
  }
  __device__ __forceinline__ void store_statistics(const ShortGradientUnit& unit, int32_t row,
                                                   float lse, float delta) const {
    const BackwardWorkspace& workspace = modifiers.workspace;
    if (!modifiers.stores_statistics || threadIdx.x % 4 != 0 || row >= workspace.rows) return;
    const int64_t index = workspace.row_index(unit.index, row);
    workspace.lse_log2[index] = lse;
    workspace.delta[index] = delta;
  }
  // Stores them for the rows of the workspace behind the last tile of query rows.
  __device__ __forceinline__ void store_padding(const ShortGradientUnit& unit) const {
    const BackwardWorkspace& workspace = modifiers.workspace;
    if (!modifiers.stores_statistics) return;
    for (int32_t row = call.q_tiles * 64 + threadIdx.x; row < workspace.rows;
         row += Config::kThreads) {
      const int64_t index = workspace.row_index(unit.index, row);
      workspace.lse_log2[index] = -minus_infinity();
      workspace.delta[index] = 0.0f;
    }
  }

  // Adds a key tile to dQ, and stores P and dS.
  __device__ __forceinline__ void add(Sums& dquery, BiasSums& dbias, const ShortGradientUnit& unit,
                                      int32_t row0, int tile, const float (&lse)[2],
                                      const float (&delta)[2], uint32_t parity) const {
    const Band& band = unit.band;
    const bool is_cut =
        !band.all_allowed(row0, min(row0 + 64, band.q_len), tile * 64, tile * 64 + 64);
    const int lane = threadIdx.x % 32, row = warp_row() + lane % 16;
    const uint32_t place = tiles.scores(group, tile, ShortGradient::kValue).address(row, lane / 16);
    const uint32_t dplace = tiles.scores(group, tile, ShortGradient::kKey).address(row, lane / 16);
    constexpr int kUnrolled = kGeneral ? 1 : 2;  // the code for modifiers is long
#pragma unroll kUnrolled
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && tile * 64 + 32 >= call.kv_len) break;  // no results depend on the rest
      Scores scores, dscores;
      const Tile key = unknown_address(tiles.key(tile));
      start_product(scores, tiles.query(group), key, half);
      start_product(dscores, tiles.dout(group), tiles.value(tile), half);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_results(scores[0]);
      if constexpr (kGeneral) {
        find_modified(unit, row0, tile, half, scores, dscores, lse, delta);
        if constexpr (Config::kSumsBias) add_dscores(dbias[0], dscores[0], half);
        scale_dscores(dscores[0]);
      } else {
        if constexpr (kHasKeyMask) forbid_half(scores, tile, half);
        if (is_cut) mask_band(scores, band, row0 + warp_row(), tile * 64 + half * 32);
        find_probabilities(scores, lse);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_results(dscores[0]);
        find_dscores(scores, dscores, delta);
      }
      Rounded rounded, drounded;
      round_fragments<Element>(rounded, scores[0]);
      round_fragments<Element>(drounded, dscores[0]);
      ptx::wgmma_results(dquery);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        ptx::Wgmma<Element, 64>::template rs<1>(dquery, drounded[k],
                                                operand_mn_major(key, 0, half * 2 + k), 1);
      }
      ptx::wgmma_commit_group();
      if (half == 0) await_buffer(tile, parity);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        ptx::stmatrix_x4(place ^ ((half * 2 + k) * 32), rounded[k]);
        ptx::stmatrix_x4(dplace ^ ((half * 2 + k) * 32), drounded[k]);
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(dquery);
  }

  // Starts d = a b^T for 64 rows of a and one half of the rows of b.
  static __device__ __forceinline__ void start_product(Scores& d, const Tile& a, const Tile& b,
                                                       int half) {
    forget(d[0]);
    const Tile a_rows = unknown_address(a), b_rows = unknown_address(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<Element, 32>::template ss<0, 0>(d[0], operand_k_major(a_rows, 0, k),
                                                 operand_k_major(b_rows, half * 32, k), k > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Turns S into P and dP into dS, with modifiers.
  __device__ __forceinline__ void find_modified(const ShortGradientUnit& unit, int32_t row0,
                                                int tile, int half, Scores& scores, Scores& dscores,
                                                const float (&lse)[2],
                                                const float (&delta)[2]) const {
    const Backward& params = modifiers.params;
    const BatchIndex batch = unit.at.batch_index();
    const int32_t row = row0 + warp_row(), col = tile * 64 + half * 32;
    const ScoreGradient<true, 1, 4, Element> gradient(params, batch, unit.at.head, row, col);
    mark_bad_keys<Tile::kRows>(scores, keys.bad[tile], half * 32);
    modify_tile<kEveryModifier, true>(scores, params, batch, unit.at.head, unit.band, row, col);
    gradient.probabilities(scores[0], lse, 1.0f, 0, 0, 4);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(dscores[0]);
    const float row_lse[1][2] = {{lse[0], lse[1]}}, row_delta[1][2] = {{delta[0], delta[1]}};
    gradient.finish(scores, dscores, row_lse, row_delta);
  }
  // Adds dS of one half of the keys to the sums of the bias's gradient.
  static __device__ __forceinline__ void add_dscores(Sums& sums, const float (&dscores)[4][4],
                                                     int half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Registers have no index that is known at run time.
        sums[n][e] += half == 0 ? dscores[n][e] : 0.0f;
        sums[4 + n][e] += half == 1 ? dscores[n][e] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void scale_dscores(float (&dscores)[4][4]) const {
    if constexpr (kScaledDlogits<Element>) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dscores[n][e] *= call.dscore_scale;
      }
    }
  }

  // Forbids keys of one half of a tile.
  __device__ __forceinline__ void forbid_half(Scores& scores, int tile, int half) const {
    const uint32_t word = half == 0 ? keys.allowed[tile].x : keys.allowed[tile].y;
    if (word != ~0u) forbid_keys(scores, {word, 0});
  }
  // Turns S into P.
  __device__ __forceinline__ void find_probabilities(Scores& scores, const float (&lse)[2]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[0][n][e] = ptx::ex2_approx_ftz(fmaf(scores[0][n][e], call.to_log2, -lse[e / 2]));
      }
    }
  }
  // Turns dP into dS.
  __device__ __forceinline__ void find_dscores(const Scores& probabilities, Scores& dscores,
                                               const float (&delta)[2]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dscores[0][n][e] =
            probabilities[0][n][e] * fmaf(dscores[0][n][e], call.dscore_scale, -delta[e / 2]);
      }
    }
  }

  // Waits until P and dS that were in a tile's buffer have been read.
  __device__ __forceinline__ void await_buffer(int tile, uint32_t parity) const {
    const int before = tile - Config::kBuffers;
    wait_short(barriers.summed[before < 0 ? before + Config::kTiles : before],
               before < 0 ? parity ^ 1 : parity);
  }

  // Computes and stores dV or dK of a key tile.
  __device__ __forceinline__ void find_key_gradient(const ShortGradientUnit& unit, int tile,
                                                    ShortGradient of) const {
    const bool is_key = of == ShortGradient::kKey;
    Sums sums;
    multiply(sums, unit, tile, of);
    arrive_short(barriers.summed[tile]);
    const RowsOperand& to = is_key ? call.dkey : call.dvalue;
    const int32_t row = tile * 64 + warp_row();
    store_rows(to.at<Element>(unit.at, row), to.row, call.kv_len - row,
               is_key ? call.head_dim : call.value_dim, is_key ? call.sum_scale : 1.0f, sums);
  }

  // Sums up P^T dO or dS^T Q over the tiles of query rows that may attend to a key tile.
  __device__ __forceinline__ void multiply(Sums& sums, const ShortGradientUnit& unit, int tile,
                                           ShortGradient of) const {
    clear(sums);
    ptx::wgmma_results(sums);  // the zeros must not move past the first fence
#pragma unroll 1
    for (int q_tile = 0; q_tile < call.q_tiles; ++q_tile) {
      if (!attends(unit.attended(q_tile), tile)) continue;
      const Tile a = unknown_address(tiles.scores(q_tile, tile, of));
      const Tile b =
          unknown_address(of == ShortGradient::kKey ? tiles.query(q_tile) : tiles.dout(q_tile));
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ptx::Wgmma<Element, 64>::template ss<1, 1>(sums, operand_mn_major(a, 0, k),
                                                   operand_mn_major(b, 0, k), 1);
      }
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(sums);
  }
};

template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    backward_short_kernel(const __grid_constant__ ShortGradientCall call, const __grid_constant__
                          typename ShortGradientGroup<Config, Element>::Modifiers modifiers) {
  using Group = ShortGradientGroup<Config, Element>;
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(16) uint8_t barriers_bytes[sizeof(ShortGradientBarriers<Config>)];
  __shared__ typename Group::Keys keys;
  auto& barriers = *reinterpret_cast<ShortGradientBarriers<Config>*>(barriers_bytes);
  if constexpr (Config::kGeneral) {
    const BackwardWorkspace& workspace = modifiers.workspace;
    if (modifiers.stores_statistics && blockIdx.x == 0 && threadIdx.x < kMaxBlockQ) {
      workspace.lse_log2[workspace.padding + threadIdx.x] = -minus_infinity();
      workspace.delta[workspace.padding + threadIdx.x] = 0.0f;
    }
  }
  if (threadIdx.x < Config::kTiles) {
    const auto init = [&](uint64_t (&of_tiles)[Config::kTiles], uint32_t arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&of_tiles[threadIdx.x]), arrivals);
    };
    init(barriers.queries, 1);
    init(barriers.keys, 1);
    init(barriers.scored, Config::kTiles * 4 * kWarpArrivals);
    init(barriers.summed, 2 * 4 * kWarpArrivals);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const ShortGradientTiles<Config> tiles{ptx::shared_address(tiles_smem)};
  if constexpr (Config::kSumsBias) {
    Group{call, modifiers, barriers, keys, tiles, group, ShortBiasWalk(call, modifiers)}.run();
  } else {
    Group{call, modifiers, barriers, keys, tiles, group, ShortGradientWalk(call)}.run();
  }
}

// Returns whether the kernel computes the gradient of the call's bias.
inline bool sums_short_bias(const Backward& params) {
  return params.dbias && short_gradient_tiles(params.shape) == 1;
}

// `stores_statistics`: see ShortGradientModifiers.
template <int kTiles, typename Element, uint32_t kModifiers>
Status launch_short_tiles(const Backward& params, const BackwardWorkspace& workspace,
                          bool stores_statistics, cudaStream_t stream) {
  using Config = ShortGradientConfig<kTiles, kModifiers>;
  const auto launch = [&](int64_t blocks, const ShortGradientCall& call, const auto& modifiers) {
    return launch_kernel("sm90::backward_short_kernel", params.shape,
                         backward_short_kernel<Config, Element>, blocks, Config::kThreads,
                         Config::kSmemBytes, stream, call, modifiers);
  };
  ShortGradientCall call(params, kScaledDlogits<Element>);
  Status status = make_backward_maps(params, 64, 64, call.maps);
  int sms = 0;
  if (status.ok()) status = multiprocessors(sms);
  if (!status.ok()) return status;
  const int64_t blocks = std::min<int64_t>(call.units, int64_t{sms} * Config::kBlocks);
  if constexpr (Config::kHasKeyMask) {
    return launch(blocks, call, key_mask_of(params));
  } else if constexpr (!Config::kGeneral) {
    return launch(blocks, call, NoModifiers{});
  } else {
    const BiasOwnership ownership(params.shape, params.dbias, 64);
    ShortGradientModifiers modifiers{params, workspace, ownership, {}, false, stores_statistics};
    if (!sums_short_bias(params)) return launch(blocks, call, modifiers);
    const BiasParts parts(params, workspace, ownership, ownership.summed_tiles(), kShortBiasBlocks);
    modifiers.params = parts.of(params);
    modifiers.parts = parts;
    modifiers.sums_bias = true;
    status = launch(ownership.blocks() * parts.parts, call, modifiers);
    return status.ok() ? launch_bias_parts(params, parts, stream) : status;
  }
}

template <typename Element, uint32_t kModifiers>
Status launch_backward_short(const Backward& params, const BackwardWorkspace& workspace,
                             bool stores_statistics, cudaStream_t stream) {
  const auto launch = [&](auto tiles) {
    return launch_short_tiles<tiles.value, Element, kModifiers>(params, workspace,
                                                                stores_statistics, stream);
  };
  const int32_t tiles = short_gradient_tiles(params.shape);
  if (tiles == 1) return launch(std::integral_constant<int, 1>{});
  if (tiles == 2) return launch(std::integral_constant<int, 2>{});
  if (tiles == 3) return launch(std::integral_constant<int, 3>{});
  if constexpr (kModifiers == kEveryModifier) {
    return Status::internal("jax_flash: a kernel was chosen that does not take the call");
  } else {
    return launch(std::integral_constant<int, 4>{});
  }
}

}  // namespace jax_flash::sm90
