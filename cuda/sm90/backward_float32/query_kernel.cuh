// Computes dQ of float32 operands with warpgroup-level matrix instructions of TF32.
//
//   for each tile of keys that some row of the block may attend to
//     S = Q K^T,  dP = dO V^T                               dO from registers
//     P = 2^(scale log2(e) S - lse),  dS = P (dP - delta)   lse in log2 units
//     dQ += dS K                                            dS from registers
//
// A block owns 128 rows of a head, each of two consumer warpgroups 64 of them. The first warp of
// the first warpgroup starts the copies. In shared memory are the block's tiles of Q, and a ring of
// slots, which K, V, and K transposed take in turn. S of a step starts before dQ of the step before
// is done.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/float32_tiles.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward_float32/config.cuh"
#include "sm90/float32_products.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/block_place.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// At head dim 128, a step has half of a tile's keys, since registers are scarce.
template <int kHeadDim>
using Float32QueryConfig = Float32BackwardConfig<kHeadDim, 1, (kHeadDim <= 64 ? 64 : 32)>;

// Names what a block works on. It is in shared memory, since registers are scarce.
struct Float32QueryWork {
  int32_t head, row0;
  int64_t batch_index;
  Band band;
  Range tiles;        // of keys
  int64_t key_index;  // of the head's first key tile in the workspace
  int32_t last;       // the last tile with a key that some query may attend to

  __device__ __forceinline__ bool has_keys() const { return last >= tiles.first; }
};

// Called by a whole warp.
template <typename Config>
__device__ __forceinline__ Float32QueryWork describe_queries(const Backward& params,
                                                             const Float32Gradient& tiles) {
  constexpr int kQueries = Config::kOwnRows;
  const Shape& shape = params.shape;
  const QueryTilePlace<kQueries> place(params, blockIdx.x, true);
  Float32QueryWork work;
  work.head = place.head;
  work.row0 = place.tile * kQueries;
  work.batch_index = place.batch_index;
  work.band = Band(params, BatchIndex(shape, place.batch_index));
  work.tiles = kv_tiles<Config::kTileRows>(work.band, work.row0, work.row0 + kQueries);
  const int64_t kv_head =
      place.batch_index * shape.kv_heads + place.head / (shape.heads / shape.kv_heads);
  work.key_index = kv_head * tiles.key_tiles;
  work.last = last_key_tile(tiles.bits + work.key_index, work.tiles.first, work.tiles.end);
  return work;
}

// Called by one warp, whose first lane starts the copies.
template <typename Config>
__device__ __forceinline__ void produce_keys(const Shape& shape, const Float32Gradient& tiles,
                                             const Float32QueryWork& work,
                                             const Float32BackwardSmem<Config>& smem) {
  constexpr int kParts = Config::kTileRows / Config::kRows, kTile = Config::kOwnBytes / 4;
  if (!work.has_keys()) return;
  const bool leads = threadIdx.x % 32 == 0;
  Float32BackwardProducer<Config> producer{smem};
  const int32_t first = work.row0 / Config::kTileRows;
  const int64_t own =
      ((work.batch_index * shape.heads + work.head) * tiles.query_tiles + first) * kTile;
  if (leads) {
    ptx::mbarrier_arrive_expect_tx(smem.own_full(), Config::kConsumers * Config::kOwnBytes);
    producer.load_own(0, tiles.query + own, tiles.query_tiles - first);
  }
  for (int32_t tile = work.last; tile >= work.tiles.first;) {
    const int64_t index = work.key_index + tile, at = index * kTile;
    const int32_t next = last_key_tile(tiles.bits + work.key_index, work.tiles.first, tile);
    const bool last = next < work.tiles.first;
    if (leads) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        producer.load_keys(tiles.key + at, part, tiles.bits + index, tile * kParts + part,
                           last && part == kParts - 1);
        producer.load_plain(tiles.value + at, part);
        producer.load_transposed(tiles.key_transposed + at, part);
      }
    }
    __syncwarp();
    tile = next;
  }
}

template <typename Config>
struct Float32QueryConsumer {
  static constexpr int kN = Config::kRows / 8, kGradientN = Config::kHeadDim / 8;
  const Float32QueryWork& work;
  const Float32BackwardSmem<Config>& smem;
  float to_log2;

  uint32_t dout[kGradientN][4];
  float scores[kN][4], dscores[kN][4];
  uint32_t dweights[kN][4];  // dS, rounded
  float dquery[1][kGradientN][4];
  float lse[2], delta[2];  // of the thread's rows
  RingState<Config::kSlots> slot;

  // Sets scores to -inf where the query may not attend to the key.
  __device__ __forceinline__ void mask(int32_t col0) {
    constexpr int kBits = 2 * kN;  // of a thread's keys
    const int32_t row0 = work.row0 + consumer_group() * 64;
    const uint32_t of_tile = smem.keys[slot.stage].bits.words[threadIdx.x % 4];
    const uint32_t keys = of_tile >> col0 % Config::kTileRows / 32 * kBits & kAllBits<kN>;
    const bool edge =
        !work.band.all_allowed(row0, min(row0 + 64, work.band.q_len), col0, col0 + Config::kRows);
    if (!edge && __all_sync(0xffffffff, keys == kAllBits<kN>)) return;
    AllowedBits allowed = {{keys, keys}};
    if (edge) forbid_edges(allowed, work.band, work.row0 + consumer_row(), col0);
    forbid<kN>(scores, allowed, 0);
  }

  // The slots from `slot` on hold K, V, and K transposed. Returns whether this is the last step.
  // kFirst: it is the first.
  template <bool kFirst>
  __device__ __forceinline__ bool step() {
    smem.await(slot, 0);
    start_product<Config::kHeadDim>(scores, smem.own(0, consumer_group()), smem.plain(slot.stage));
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<1>();  // dQ of the last step is done
      ptx::wgmma_results(dquery[0]);
      arrive_warp(smem.empty((slot.stage + Config::kSlots - 1) % Config::kSlots));
    }
    smem.await(slot, 1);
    start_product(dscores, dout, smem.plain(slot.next(1).stage));
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores);
    // Reductions, whose results the compiler knows to be the same in all lanes.
    const int32_t tile = __reduce_max_sync(0xffffffff, smem.keys[slot.stage].tile);
    const bool last = __any_sync(0xffffffff, smem.keys[slot.stage].last);
    mask(tile * Config::kRows);
    sync_and_arrive_warp(smem.empty(slot.stage));
#pragma unroll
    for (auto& block : scores) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        block[e] = ptx::ex2_approx_ftz(fmaf(block[e], to_log2, -lse[e / 2]));
      }
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(dscores);
    arrive_warp(smem.empty(slot.next(1).stage));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dscores[n][e] = scores[n][e] * (dscores[n][e] - delta[e / 2]);
      }
    }
    round_operands(dscores, dweights);
    smem.await(slot, 2);
    start_addition(dquery[0], dweights, smem.transposed(slot.next(2).stage));
    slot.advance(3);
    return last;
  }

  __device__ __forceinline__ void run(const Backward& params, const BackwardWorkspace& workspace) {
    const Shape& shape = params.shape;
    const int32_t row = work.row0 + consumer_row();
    const BatchIndex batch(shape, work.batch_index);
    set_zero(dquery);
    if (work.has_keys()) {
      const int64_t head = work.batch_index * shape.heads + work.head;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t own = row + fragment_row(0, 2 * half);
        const int64_t index = workspace.row_index(head, own);
        lse[half] = own < shape.q_len ? workspace.lse_log2[index] : -minus_infinity();
        delta[half] = own < shape.q_len ? workspace.delta[index] : 0.0f;
      }
      const Operand& from = params.dout;
      const float* first = batch.pointer<const float>(from, work.head) + row * from.row;
      const bool vectors = from.row % 4 == 0 && shape.value_dim % 4 == 0 &&
                           reinterpret_cast<uintptr_t>(first) % 16 == 0;
      read_operands(dout, first, from.row, work.band.q_len - row, shape.value_dim, vectors);
      ptx::mbarrier_wait(smem.own_full(), 0);
      bool last = step<true>();
      while (!last) last = step<false>();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(dquery[0]);
    }
    const Operand& to = params.dquery;
    store_gradient(
        Float32Rows(batch.pointer<float>(to, work.head) + row * to.row, to.row, shape.head_dim),
        shape.q_len - row, params.options.scale, dquery[0]);
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    float32_query_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                         const Float32Gradient tiles) {
  run_block<Config>([&] { return describe_queries<Config>(params, tiles); },
                    [&](const Float32QueryWork& work, const auto& smem) {
                      produce_keys<Config>(params.shape, tiles, work, smem);
                    },
                    [&](const Float32QueryWork& work, const auto& smem) {
                      Float32QueryConsumer<Config>{work, smem, params.options.scale * kLog2E}.run(
                          params, workspace);
                    });
}

}  // namespace jax_flash::sm90
