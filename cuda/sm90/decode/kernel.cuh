// Computes the forward pass of calls with few query rows, such as decoding, on sm_90. Memory
// bandwidth bounds it. A unit is some queries of the heads that share a key/value head, usually all
// queries, in one batch entry. For each tile of its keys, S = Q K^T, P = 2^(scale log2(e) S - m)
// with m the row's running maximum, and O = O 2^(m_old - m) + P V.
//
// The query rows of all heads that share a key/value head form tiles of up to 64 rows, one for each
// unit, so that keys and values are read once for a tile. Persistent blocks, the workers, divide
// the keys of all units evenly (plan/decode.h). A second kernel combines the parts of a divided
// unit (sm90/decode/combine.cuh).
//
// Roles of warps. One warpgroup computes, faster than tiles arrive. Warp 4 copies K and V in a ring
// of tiles, which does not drain between units. Warp 5 copies Q and describes the work.
//
// Shared memory: Q, then a ring in which tiles of K and of V alternate (DecodeConfig, DecodeSmem).
#pragma once

#include <cstdint>

#include "modifiers/logits.cuh"
#include "modifiers/sinks.cuh"
#include "params.h"
#include "plan/decode.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/combine.cuh"
#include "sm90/decode/config.cuh"
#include "sm90/decode/walk.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/fragments.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Copies K and V of the worker's parts of units, in one ring. Called by one warp.
template <typename Config>
__device__ __forceinline__ void produce_decode_keys(const DecodeCall& call, const ForwardMaps& maps,
                                                    const DecodeSmem<Config>& smem) {
  RingState<Config::kSlots> slot;
  const int32_t worker = call.worker_of_block(static_cast<int32_t>(blockIdx.x));
  for (DecodeWalk<Config::kBlockKv> walk(call, worker); walk.valid();) {
    const DecodeUnit unit(call, walk.unit);
    const Range tiles = call.tiles_of<Config::kBlockKv>(call.band_of<true>(unit.batch));
    const Range part = walk.part(decode_cost(tiles));
    const int32_t end = min(tiles.first + part.end, tiles.end);
    if (threadIdx.x % 32 == 0) {
      for (int32_t tile = tiles.first + part.first; tile < end; ++tile) {
        const auto load = [&](const CUtensorMap& map, const BoxAxes& axes) {
          ptx::mbarrier_wait(smem.empty(slot.stage), slot.parity ^ 1);
          load_tile_boxes(smem.slot(slot.stage), map, smem.full(slot.stage), axes, unit.batch_axes,
                          unit.kv_head, tile * Config::kBlockKv);
          slot.advance();
        };
        load(maps.key, call.key);
        load(maps.value, call.value);
      }
    }
    walk.advance(part);
  }
}

// Copies Q of the worker's units and writes the descriptions of the work. Called by one warp.
template <typename Config>
__device__ __forceinline__ void produce_decode_queries(const DecodeCall& call,
                                                       const ForwardMaps& maps,
                                                       const DecodeSmem<Config>& smem) {
  using QueryTile = typename Config::QueryTile;
  const bool leader = threadIdx.x % 32 == 0;
  const int32_t worker = call.worker_of_block(static_cast<int32_t>(blockIdx.x));
  uint32_t parity = 1;
  for (DecodeWalk<Config::kBlockKv> walk(call, worker); walk.valid();) {
    const DecodeUnit unit(call, walk.unit);
    const Band batch_band = call.band_of<true>(unit.batch);
    const Range tiles = call.tiles_of<Config::kBlockKv>(batch_band);
    const Band band = batch_band.rows_from(unit.query, call.queries.divisor);
    const int32_t cost = decode_cost(tiles);
    const Range part = walk.part(cost);
    const bool begins = part.first == 0, whole = begins && part.end == cost;
    if (leader) {
      ptx::mbarrier_wait_asleep(smem.query_empty(), parity);
      ptx::mbarrier_arrive_expect_tx(smem.query_full(), call.rows * 128 * QueryTile::kPanels);
#pragma unroll
      for (int panel = 0; panel < QueryTile::kPanels; ++panel) {
        load_box(smem.query().root + panel * QueryTile::kPanelBytes, maps.query, smem.query_full(),
                 call.query, unit.batch_axes, unit.head, unit.query, panel * 64);
      }
      DecodeWork& work = *smem.work;
      // The addresses are computed here: a consumer would stall at the end of its part on
      // parameters that it reads for the first time.
      const int64_t place = worker * 2 + begins;
      work.out = whole ? static_cast<void*>(unit.at<uint16_t>(call.out))
                       : call.workspace.out + place * decode_pitch(Config::kHeadDim);
      work.lse = whole ? unit.at<float>(call.lse) : call.workspace.statistics + place * 2;
      work.sinks = call.sinks.data == nullptr ? nullptr : unit.at<float>(call.sinks);
      work.band = band;
      work.queries = min(call.queries.divisor, call.q_len - unit.query);
      work.attended = {band.first_col(0), band.end_col(band.q_len - 1)};
      work.tile = tiles.first + part.first;
      work.end = min(tiles.first + part.end, tiles.end);
      work.kind = whole ? DecodeWork::kWhole : DecodeWork::kPart;
      ptx::mbarrier_arrive(smem.query_full());
    }
    parity ^= 1;
    walk.advance(part);
  }
  if (leader) {
    ptx::mbarrier_wait_asleep(smem.query_empty(), parity);
    smem.work->kind = DecodeWork::kNoMoreWork;
    for (int i = 0; i < 2; ++i) ptx::mbarrier_arrive(smem.query_full());
  }
}

// Computes out and statistics of a worker's parts. The computing warpgroup calls its functions.
template <typename Config, typename Element>
struct DecodeConsumer {
  static constexpr int kN = Config::kBlockKv / 8, kOutN = Config::kHeadDim / 8;
  static constexpr int kHeadSteps = Config::kHeadDim / 16, kKeySteps = Config::kBlockKv / 16;
  using ScoreProduct = ptx::Wgmma<Element, Config::kBlockKv>;
  using OutProduct = ptx::Wgmma<Element, Config::kHeadDim>;

  const DecodeCall& call;
  const DecodeSmem<Config>& smem;
  int warp_row;  // the warp's first row
  RingState<Config::kSlots> slot;
  DecodeWork work;
  int32_t first_col[2], end_col[2];  // columns that this thread's rows may attend to
  OnlineSoftmax<1> softmax;
  float scores[1][kN][4];
  float out[1][kOutN][4];
  uint32_t probabilities[kKeySteps][4] = {};

  __device__ __forceinline__ DecodeConsumer(const DecodeCall& decode_call,
                                            const DecodeSmem<Config>& where)
      : call(decode_call),
        smem(where),
        // The reduction makes the row uniform for the compiler.
        warp_row(__reduce_max_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32 * 16)) {}

  // Returns this thread's row, an index in [group, queries].
  __device__ __forceinline__ int32_t row(int half) const {
    return warp_row + fragment_row(0, 2 * half);
  }
  __device__ __forceinline__ int32_t head(int half) const {
    return call.queries.quotient(row(half));
  }
  __device__ __forceinline__ int32_t position(int half) const {
    return row(half) - head(half) * call.queries.divisor;
  }
  __device__ __forceinline__ bool has_rows() const { return warp_row < call.rows; }

  // Waits for the next part of a unit; returns false after the last one.
  __device__ __forceinline__ bool wait_query(uint32_t parity) {
    ptx::mbarrier_wait(smem.query_full(), parity);
    work = *smem.work;
    const auto same = [](int32_t& value) { value = __reduce_max_sync(0xffffffff, value); };
    same(work.tile);
    same(work.end);
    same(work.kind);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first_col[half] = work.band.first_col(position(half));
      end_col[half] = work.band.end_col(position(half));
    }
    return work.kind != DecodeWork::kNoMoreWork;
  }

  __device__ __forceinline__ void wait_slot() const {
    ptx::mbarrier_wait(smem.full(slot.stage), slot.parity);
  }
  __device__ __forceinline__ void release_slot() {
    arrive_warp(smem.empty(slot.stage));
    slot.advance();
  }

  // Starts S = Q K^T for the tile in a slot.
  __device__ __forceinline__ void start_scores(uint32_t key_slot) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSteps; ++k) {
      ScoreProduct::template ss<0, 0>(scores[0], descriptor_k_major(smem.query(), 0, k),
                                      descriptor_k_major(smem.slot(key_slot), 0, k), k > 0);
    }
    ptx::wgmma_commit_group();
  }
  template <int kOthers>
  __device__ __forceinline__ void await_scores() {
    ptx::wgmma_wait_group<kOthers>();
    ptx::wgmma_results(scores[0]);
  }
  // Starts O += P V for the tile in the ring's next slot.
  __device__ __forceinline__ void start_out(int32_t tile) {
    wait_slot();
    zero_unattended<Config>(smem.slot(slot.stage), tile, work.attended, call.kv_len);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      OutProduct::template rs<1>(out[0], probabilities[k],
                                 descriptor_mn_major(smem.slot(slot.stage), 0, k),
                                 k > 0 || tile > work.tile);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void await_out() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(out[0]);
    release_slot();
  }

  // Computes the part's tiles. The exponentials of a tile overlap P V of the tile before. Warps
  // without rows only take part in the products.
  __device__ __forceinline__ void compute() {
    softmax = OnlineSoftmax<1>();
    if (work.tile >= work.end) return;
    float factor[1][2];
    wait_slot();
    start_scores(slot.stage);
    await_scores<0>();
    release_slot();
    if (has_rows()) {
      find_exponentials(work.tile, factor);
      convert();
    }
    int32_t tile = work.tile;
    for (; tile + 1 < work.end; ++tile) {
      const auto key_slot = slot.next(1);
      ptx::mbarrier_wait(smem.full(key_slot.stage), key_slot.parity);
      start_scores(key_slot.stage);
      start_out(tile);
      await_scores<1>();
      arrive_warp(smem.empty(key_slot.stage));
      const bool rises = has_rows() && find_exponentials(tile + 1, factor);
      await_out();
      slot.advance();  // past the keys
      if (has_rows()) {
        convert();
        if (rises) softmax.rescale(out, factor);
      }
    }
    start_out(tile);
    await_out();
  }

  // Computes the exponentials of a tile's scores. Returns whether the output must be multiplied by
  // `factor`.
  __device__ __forceinline__ bool find_exponentials(int32_t tile, float (&factor)[1][2]) {
    const int32_t col0 = tile * Config::kBlockKv;
    if (!work.band.all_allowed(0, call.queries.divisor, col0, col0 + Config::kBlockKv)) {
      const int32_t base = col0 + fragment_col(0, 0);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int32_t col = base + n * 8 + e % 2;
          if (col < first_col[e / 2] || col >= end_col[e / 2]) scores[0][n][e] = minus_infinity();
        }
      }
    }
    // Running maxima have no slack: a greatest P of exactly 1 has no rounding error
    // (sm90/forward/exact_maximum.cuh).
    const float slack[1][2] = {};
    const bool rises = softmax.template raise_maximum<4>(scores, call.to_log2, slack, factor);
#pragma unroll
    for (int n = 0; n < kN; ++n) softmax.exponentials(scores[0][n], 0, call.to_log2);
    return rises;
  }
  __device__ __forceinline__ void convert() { round_fragments<Element>(probabilities, scores[0]); }

  // Writes out and lse of a whole unit.
  __device__ __forceinline__ void finish() {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t unit_head = head(half), at = position(half);
      const bool valid = row(half) < call.rows && at < work.queries;
      const float sink_log2 =
          read_sink(work.sinks != nullptr && valid, work.sinks + unit_head * call.sinks.head);
      float lse, normalizer;
      softmax.finish(0, half, call.to_log2, sink_log2, lse, normalizer);
      if (at >= work.band.q_len) {
        lse = minus_infinity();
        normalizer = 0.0f;
      }
      ptx::st_f32_if(lane == 0 && valid, work.lse + unit_head * call.lse.head + at * call.lse.row,
                     lse);
      Element* out_gmem =
          static_cast<Element*>(work.out) + unit_head * call.out.head + at * call.out.row;
#pragma unroll
      for (int n0 = 0; n0 < kOutN; n0 += 4) {
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && n0 + i < kOutN; ++i) {
          const float (&block)[4] = out[0][n0 + i];
          // A product with 0 would not suffice: without keys, `out` is not initialized.
          words[i] = normalizer == 0.0f ? 0
                                        : ptx::cvt_rn_x2<Element>(block[2 * half] * normalizer,
                                                                  block[2 * half + 1] * normalizer);
        }
        const uint4 chunk = exchange_quad(words);
        const int col = (n0 + lane) * 8;
        ptx::st_v4_if(valid && col < call.value_dim, out_gmem + col, chunk);
      }
    }
  }

  // Stores out and statistics of a part of a unit for decode_combine_kernel.
  __device__ __forceinline__ void store_part() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.sum[0][half];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      if (row(half) >= call.rows) continue;
      const int64_t at = int64_t{row(half)} * call.workspace.places;
      if (threadIdx.x % 4 == 0) {
        reinterpret_cast<float2*>(work.lse)[at] = {
            to_log2_units(softmax.maximum[0][half], call.to_log2), total};
      }
      float* part_gmem = static_cast<float*>(work.out) + at * decode_pitch(Config::kHeadDim);
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
        const int col = fragment_col(n, 0);
        if (col < call.value_dim) {
          *reinterpret_cast<float2*>(part_gmem + col) = {out[0][n][2 * half],
                                                         out[0][n][2 * half + 1]};
        }
      }
    }
  }
};

template <typename Config, typename Element>
__device__ __forceinline__ void consume_decode(const DecodeCall& call,
                                               const DecodeSmem<Config>& smem) {
  DecodeConsumer<Config, Element> consumer(call, smem);
  for (uint32_t parity = 0; consumer.wait_query(parity); parity ^= 1) {
    consumer.compute();
    arrive_warp(smem.query_empty());
    if (!consumer.has_rows()) continue;
    if (consumer.work.kind == DecodeWork::kWhole) {
      consumer.finish();
    } else {
      consumer.store_part();
    }
  }
}

template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    decode_kernel(const __grid_constant__ DecodeCall call,
                  const __grid_constant__ ForwardMaps maps) {
  constexpr int kBarriersReady = 1;  // a named barrier
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  __shared__ __align__(8) uint64_t barriers[DecodeSmem<Config>::kBarriers];
  __shared__ DecodeWork work;
  DecodeSmem<Config> smem{ptx::shared_address(smem_bytes), ptx::shared_address(barriers), &work};
  asm volatile("" : "+r"(smem.root), "+r"(smem.barriers));

  const int warp = __reduce_max_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32);
  if (warp == 4) {  // starts copies without waiting for the other warps
    if (threadIdx.x % 32 == 0) smem.init_barriers();
    __syncwarp();
    ptx::barrier_arrive(kBarriersReady, Config::kThreads);
    produce_decode_keys<Config>(call, maps, smem);
    return;
  }
  if (warp < 4) {  // Q's rows after the last one stay zero
    using QueryTile = typename Config::QueryTile;
    for (int index = threadIdx.x; index < QueryTile::kBytes / 16; index += kWarpgroup) {
      if (index % (QueryTile::kPanelBytes / 16) / 8 >= call.rows) {
        ptx::st_shared_v4(smem.root + index * 16, uint4{});
      }
    }
    ptx::fence_proxy_async_shared();
  }
  ptx::barrier_sync(kBarriersReady, Config::kThreads);
  if (warp < 4) {
    consume_decode<Config, Element>(call, smem);
  } else {
    ptx::griddepcontrol_launch_dependents();
    produce_decode_queries<Config>(call, maps, smem);
  }
}

template <typename Config, typename Element>
Status launch_decode_plan(const Forward& params, const DecodePlan& plan, cudaStream_t stream) {
  const Shape& shape = params.shape;
  if (DecodeWorkspace::pitch(shape) != decode_pitch(Config::kHeadDim)) {
    return Status::unimplemented(
        "jax_flash: this library lacks the decoding kernel of the head dim");
  }
  ForwardMaps maps;
  // The L2 promotion is 128 bytes; 256 bytes, as in other kernels, would cost 7% of the bandwidth.
  Status status =
      make_forward_maps(params, static_cast<int>(DecodeUnits(shape).queries), Config::kBlockKv,
                        maps, shape.heads / shape.kv_heads, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (!status.ok()) return status;
  const DecodeCall call(params, plan, Config::kBlockKv);
  status = launch_kernel("sm90::decode_kernel", shape, decode_kernel<Config, Element>, plan.workers,
                         Config::kThreads, Config::kSmemBytes, stream, call, maps);
  if (!status.ok() || !call.divides_units()) return status;
  return launch_combine<Config::kHeadDim, Config::kBlockKv, Element>(call, shape, stream);
}

// Launches decoding. kHeadDim bounds head_dim and value_dim.
template <typename Element, int kHeadDim>
Status launch_decode(const Forward& params, cudaStream_t stream) {
  using Config = DecodeConfigOf<kHeadDim>;
  int sms = 0;
  if (const Status status = multiprocessors(sms); !status.ok()) return status;
  const bool moves = params.query_seq_lengths || params.key_value_seq_lengths || params.window ||
                     (params.query_offset && banded(params.options));
  const int64_t workers = std::min(sms, kDecodeMultiprocessors) * Config::kBlocks;
  return launch_decode_plan<Config, Element>(params, DecodePlan::make(params.shape, workers, moves),
                                             stream);
}

}  // namespace jax_flash::sm90
