// Defines the parameters of the sm_90 decoding kernels (DecodeCall), and finds the parts of units
// that a worker computes (DecodeWalk).
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/decode.h"
#include "plan/divisor.h"
#include "sm90/forward/plan.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Returns the cost of a unit, by which workers divide units: its number of key tiles. A unit
// without keys costs 1, so that some worker owns it.
__host__ __device__ __forceinline__ int32_t decode_cost(const TileRange& tiles) {
  return tiles.end > tiles.first ? tiles.end - tiles.first : 1;
}

// Divides all tiles, or those of a unit, among at most `most` workers. Each of these gets enough
// tiles.
struct DecodeShares {
  int32_t workers, share, rest;

  __host__ __device__ __forceinline__ DecodeShares(int32_t most, int32_t block_kv, int32_t total) {
    const int32_t least = kDecodeSplitKeys / block_kv;  // fewest tiles of a worker
    workers = (total + least - 1) / least;
    if (workers > most) workers = most;
    share = total / workers;
    rest = total % workers;
  }
  __device__ __forceinline__ int32_t start(int32_t worker) const {
    return worker * share + min(worker, rest);
  }
};

// Holds the parameters contiguously, for the same reason as ForwardPlan.
struct DecodeCall {
  DecodePlan plan;
  BoxAxes key, value, query;
  CallBand band;
  TileRange tiles;      // key tiles, if units are alike: at most, if operands decide
  Divisor cost;         // cost of a unit
  DecodeShares shares;  // shares of a unit if the plan has parts, else of all tiles
  Divisor parts;        // parts of a unit, or 1
  Divisor inner_batch, batch_units, chunks, queries;  // batch_units: units of a batch entry
  int32_t group, rows, q_len, kv_len, value_dim;
  float to_log2;
  RowsOperand out, lse, sinks;
  DecodeWorkspace workspace;

  DecodeCall(const Forward& params, const DecodePlan& decode_plan, int32_t block_kv)
      : plan(decode_plan),
        key(params.key),
        value(params.value),
        query(params.query),
        band(params),
        tiles(band.varies
                  ? TileRange{0, static_cast<int32_t>(ceil_div(params.shape.kv_len, block_kv))}
                  : tiles_of(band.band, block_kv)),
        cost(decode_cost(tiles)),
        shares(plan.parts ? DecodeShares(plan.parts, block_kv, cost.divisor)
                          : DecodeShares(plan.workers, block_kv, plan.units * cost.divisor)),
        parts(plan.parts ? shares.workers : 1),
        inner_batch(
            params.shape.num_batch_dims > 1 ? static_cast<int32_t>(params.shape.batch_dims[1]) : 1),
        batch_units(static_cast<int32_t>(DecodeUnits(params.shape).units / params.shape.batch)),
        chunks(static_cast<int32_t>(DecodeUnits(params.shape).chunks)),
        queries(static_cast<int32_t>(DecodeUnits(params.shape).queries)),
        group(params.shape.heads / params.shape.kv_heads),
        rows(group * queries.divisor),
        q_len(params.shape.q_len),
        kv_len(params.shape.kv_len),
        value_dim(params.shape.value_dim),
        to_log2(params.options.scale * kLog2E),
        out(params.out),
        lse(params.lse),
        sinks(params.sinks),
        workspace(DecodeWorkspace::at(params.shape, params.workspace)) {}

  // Returns whether decode_combine_kernel may have work, as far as the host knows.
  bool divides_units() const { return !plan.whole_units && !(plan.parts && parts.divisor == 1); }

  // Returns how the parts of a unit divide it, if the plan has parts.
  template <int kBlockKv>
  __device__ __forceinline__ DecodeShares shares_of_unit(const Forward& params) const {
    if (!band.varies) return shares;
    return DecodeShares(plan.parts, kBlockKv, decode_cost(tiles_of<kBlockKv>(band.of(params, 0))));
  }
  // Returns the tiles of the keys that a batch attends to. All units of a batch have them: those
  // with the same keys then read these at about the same time, from L2.
  template <int kBlockKv>
  __device__ __forceinline__ TileRange tiles_of(const Band& batch_band) const {
    return plan.ragged || band.varies ? kv_tiles<kBlockKv>(batch_band, 0, batch_band.q_len) : tiles;
  }

 private:
  // Computes kv_tiles() on the host.
  static TileRange tiles_of(const Band& band, int32_t block_kv) {
    const int32_t first = std::max(band.lo, 0);
    const int32_t end = std::min(band.q_len - 1 + band.hi, band.kv_len);
    if (first >= end) return {0, 0};
    return {first / block_kv, (end + block_kv - 1) / block_kv};
  }
};

// Names a unit, its first query head and its first query.
struct DecodeUnit {
  int32_t batch, kv_head, head, query;
  int32_t batch_axes[kTensorMapBatchDims];

  __device__ __forceinline__ DecodeUnit(const DecodeCall& call, int32_t unit) {
    batch = call.batch_units.quotient(unit);
    const int32_t in_batch = unit - batch * call.batch_units.divisor;
    kv_head = call.chunks.quotient(in_batch);
    head = kv_head * call.group;
    query = (in_batch - kv_head * call.chunks.divisor) * call.queries.divisor;
    batch_axes[0] = call.inner_batch.quotient(batch);
    batch_axes[1] = batch - batch_axes[0] * call.inner_batch.divisor;
  }

  // Returns the address of the unit's first row.
  template <typename Element>
  __device__ __forceinline__ Element* at(const RowsOperand& operand) const {
    return static_cast<Element*>(operand.data) + batch_axes[0] * operand.batch[0] +
           batch_axes[1] * operand.batch[1] + head * operand.head + query * operand.row;
  }
};

// Iterates over a worker's parts of units. Whole warps call its functions.
template <int kBlockKv>
struct DecodeWalk {
  int32_t unit, end_unit;
  int32_t remaining;  // tiles left
  int32_t first;      // first tile, counted in the unit

  __device__ __forceinline__ DecodeWalk(const Forward& params, const DecodeCall& call,
                                        int32_t worker)
      : remaining(INT32_MAX), first(0) {
    const DecodePlan& plan = call.plan;
    if (plan.whole_units) {
      const int32_t share = plan.units / plan.workers, rest = plan.units % plan.workers;
      unit = worker * share + min(worker, rest);
      end_unit = unit + share + (worker < rest);
    } else if (plan.parts) {
      // Units are alike here: without a band, an offset changes no tiles.
      unit = call.parts.quotient(worker);
      const int32_t part = worker - unit * call.parts.divisor;
      const DecodeShares shares = call.shares_of_unit<kBlockKv>(params);
      first = shares.start(part);
      set_end(shares, plan, part);
    } else if (!plan.ragged) {
      unit = call.cost.quotient(call.shares.start(worker));
      first = call.shares.start(worker) - unit * call.cost.divisor;
      set_end(call.shares, plan, worker);
    } else {
      *this = found(params, call, worker);
    }
  }

  __device__ __forceinline__ bool valid() const { return unit < end_unit && remaining > 0; }
  // Returns the worker's tiles of the unit, whose cost is `cost`, counted from the unit's first.
  __device__ __forceinline__ TileRange part(int32_t cost) const {
    return {first, first + min(remaining, cost - first)};
  }
  __device__ __forceinline__ void advance(const TileRange& part) {
    remaining -= part.end - part.first;
    first = 0;
    ++unit;
  }

 private:
  DecodeWalk() = default;

  __device__ __forceinline__ void set_end(const DecodeShares& shares, const DecodePlan& plan,
                                          int32_t worker) {
    end_unit = plan.units;
    remaining = worker < shares.workers ? shares.share + (worker < shares.rest) : 0;
  }

  // Finds the position if batches differ, from the costs of all batches. If there are more than 32
  // batches, the costs are computed twice. Out of line for the same reason as CallBand::of().
  static __device__ __noinline__ DecodeWalk found(const Forward& params, const DecodeCall& call,
                                                  int32_t worker) {
    const auto batches = static_cast<int32_t>(params.shape.batch);
    const int lane = threadIdx.x % 32;
    const auto cost = [&](int32_t batch) {
      return batch < batches ? decode_cost(call.tiles_of<kBlockKv>(call.band.find(params, batch)))
                             : 0;
    };
    int32_t mine = 0, total = 0;  // mine: of the last 32 batches
#pragma unroll 4
    for (int32_t batch = 0; batch < batches; batch += 32) {
      mine = cost(batch + lane);
      total += mine;
    }
    total = __reduce_add_sync(0xffffffff, total) * call.batch_units.divisor;
    const DecodeShares shares(call.plan.workers, kBlockKv, total);
    const int32_t start = min(shares.start(worker), total - 1);
    int32_t before = 0;
    for (int32_t batch = 0;; batch += 32) {
      if (batches > 32) mine = cost(batch + lane);
      int32_t sum = mine * call.batch_units.divisor;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t lower = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += lower;
      }
      const uint32_t beyond = __ballot_sync(0xffffffff, before + sum > start);
      if (beyond) {
        const int at = __ffs(beyond) - 1;
        before += __shfl_sync(0xffffffff, sum - mine * call.batch_units.divisor, at);
        const int32_t its_cost = __shfl_sync(0xffffffff, mine, at);
        DecodeWalk walk;
        walk.unit = (batch + at) * call.batch_units.divisor + (start - before) / its_cost;
        walk.first = (start - before) % its_cost;
        walk.set_end(shares, call.plan, worker);
        return walk;
      }
      before += __shfl_sync(0xffffffff, sum, 31);
    }
  }
};

}  // namespace jax_flash::sm90
