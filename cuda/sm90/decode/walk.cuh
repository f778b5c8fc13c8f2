// Defines the parameters of the sm_90 decoding kernels (DecodeCall), and finds the parts of units
// that a worker computes (DecodeStart, DecodeWalk).
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/decode.h"
#include "plan/divisor.h"
#include "sm90/forward/plan.cuh"
#include "tile/band.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Returns the cost of a unit, by which workers divide units: its number of key tiles. A unit
// without keys costs 1, so that some worker owns it.
__host__ __device__ __forceinline__ int32_t decode_cost(const Range& tiles) {
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
  // Returns the worker that has a tile.
  __device__ __forceinline__ int32_t worker_of(int32_t tile) const {
    const int32_t larger = rest * (share + 1);  // tiles of workers with one tile more
    return tile < larger ? tile / (share + 1) : rest + (tile - larger) / share;
  }
};

// Holds the parameters contiguously, for the same reason as ForwardPlan.
struct DecodeCall {
  DecodePlan plan;
  BoxAxes key, value, query;
  ForwardBand band;
  bool kv_lengths_alone;  // the band varies by nothing else
  Range tiles;            // key tiles, if units are alike: at most, if operands decide
  Divisor cost;           // cost of a unit
  DecodeShares shares;    // shares of a unit if the plan has parts, else of a sequence
  Divisor parts;          // parts of a unit, or 1
  Divisor sequence_workers;
  Divisor inner_batch, batch_units, chunks, queries;  // batch_units: units of a batch entry
  int32_t group, rows, q_len, kv_len, value_dim;
  float to_log2;
  RowsOperand out, lse, sinks;
  DecodeWorkspace workspace;

  DecodeCall(const Forward& params, const DecodePlan& decode_plan, int32_t block_kv)
      : DecodeCall(params, decode_plan, DecodeUnits(params.shape), block_kv) {}

  DecodeCall(const Forward& params, const DecodePlan& decode_plan, const DecodeUnits& units,
             int32_t block_kv)
      : plan(decode_plan),
        key(params.key),
        value(params.value),
        query(params.query),
        band(params),
        kv_lengths_alone(!banded(params.options) && !params.window && !params.query_seq_lengths),
        tiles(band.varies ? Range{0, static_cast<int32_t>(ceil_div(params.shape.kv_len, block_kv))}
                          : tiles_of(band.band, block_kv)),
        cost(decode_cost(tiles)),
        shares(plan.parts ? DecodeShares(plan.parts, block_kv, cost.divisor)
                          : DecodeShares(plan.workers / plan.sequences, block_kv,
                                         plan.units / plan.sequences * cost.divisor)),
        parts(plan.parts ? shares.workers : 1),
        sequence_workers(plan.workers / plan.sequences),
        inner_batch(
            params.shape.num_batch_dims > 1 ? static_cast<int32_t>(params.shape.batch_dims[1]) : 1),
        batch_units(static_cast<int32_t>(units.units / params.shape.batch)),
        chunks(static_cast<int32_t>(units.chunks)),
        queries(static_cast<int32_t>(units.queries)),
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

  // Returns the worker that a block is. The workers of a sequence are neighbours, and so are the
  // blocks that have the same tiles of different sequences.
  __device__ __forceinline__ int32_t worker_of_block(int32_t block) const {
    if (plan.sequences == 1) return block;
    const int32_t place = block / plan.sequences;
    return (block - place * plan.sequences) * sequence_workers.divisor + place;
  }

  // Returns the band of a batch entry. If key lengths alone vary, this takes few instructions,
  // which a worker fetches from memory before its first copies: keys and values have evicted them
  // from L2.
  template <bool kOutOfLine>
  __device__ __forceinline__ Band band_of(int32_t batch) const {
    if (!band.varies) return band.band;
    const int32_t outer = inner_batch.quotient(batch), inner = batch - outer * inner_batch.divisor;
    if (kv_lengths_alone) {
      Band its = band.band;
      its.hi = its.kv_len = band.kv_length(outer, inner);
      return its;
    }
    return band.of<kOutOfLine>({outer, inner});
  }

  // Returns how the parts of a unit divide it, if the plan has parts. Units are alike then: without
  // causal order or a window, an offset changes no tiles.
  template <int kBlockKv, bool kOutOfLine>
  __device__ __forceinline__ DecodeShares shares_of_unit() const {
    if (!band.varies) return shares;
    return DecodeShares(plan.parts, kBlockKv, cost_of<kBlockKv, kOutOfLine>(0));
  }
  // Returns how many units of a batch entry follow one another in a sequence: all of them, or one.
  __device__ __forceinline__ int32_t units_in_turn() const {
    return plan.sequences == 1 ? batch_units.divisor : 1;
  }
  __device__ __forceinline__ int32_t batches() const { return batch_units.quotient(plan.units); }
  // Returns the cost of the units of a batch entry.
  template <int kBlockKv, bool kOutOfLine>
  __device__ __forceinline__ int32_t cost_of(int32_t batch) const {
    return decode_cost(tiles_of<kBlockKv>(band_of<kOutOfLine>(batch)));
  }
  // Returns the tiles of the keys that a batch attends to. All units of a batch have them: those
  // with the same keys then read these at about the same time, from L2.
  template <int kBlockKv>
  __device__ __forceinline__ Range tiles_of(const Band& batch_band) const {
    return plan.ragged || band.varies ? kv_tiles<kBlockKv>(batch_band, 0, batch_band.q_len) : tiles;
  }

 private:
  // Computes kv_tiles() on the host.
  static Range tiles_of(const Band& band, int32_t block_kv) {
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

// Says where a worker starts, if workers divide units anywhere: at tile `first` of a unit. Whole
// warps call its functions.
struct DecodeStart {
  DecodeShares shares;  // of the sequence
  int32_t worker;       // among those of the sequence
  int32_t unit, first;

  // `ahead`: 1 for the next worker of the sequence, else 0.
  template <int kBlockKv>
  static __device__ __forceinline__ DecodeStart of(const DecodeCall& call, int32_t worker,
                                                   int32_t ahead = 0) {
    const int32_t sequence = call.sequence_workers.quotient(worker);
    const int32_t in_sequence = worker - sequence * call.sequence_workers.divisor + ahead;
    if (call.plan.ragged) return find_apart<kBlockKv>(call, sequence, in_sequence);
    const int32_t start = call.shares.start(in_sequence), index = call.cost.quotient(start);
    return {call.shares, in_sequence, index * call.plan.sequences + sequence,
            start - index * call.cost.divisor};
  }

 private:
  // Finds the start from the costs of all batches. If there are more than 32 batches, the costs are
  // computed twice. Out of line for the same reason as in ForwardBand::of().
  template <int kBlockKv>
  static __device__ __noinline__ DecodeStart find_apart(const DecodeCall& call, int32_t sequence,
                                                        int32_t worker) {
    const int32_t in_turn = call.units_in_turn(), batches = call.batches();
    const int lane = threadIdx.x % 32;
    const auto cost = [&](int32_t batch) {
      return batch < batches ? call.cost_of<kBlockKv, true>(batch) : 0;
    };
    int32_t mine = 0, total = 0;  // mine: of the last 32 batches
#pragma unroll 4
    for (int32_t batch = 0; batch < batches; batch += 32) {
      mine = cost(batch + lane);
      total += mine;
    }
    total = __reduce_add_sync(0xffffffff, total) * in_turn;
    const DecodeShares shares(call.sequence_workers.divisor, kBlockKv, total);
    const int32_t start = min(shares.start(worker), total - 1);
    int32_t before = 0;
    for (int32_t batch = 0;; batch += 32) {
      if (batches > 32) mine = cost(batch + lane);
      int32_t sum = mine * in_turn;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t lower = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += lower;
      }
      const uint32_t beyond = __ballot_sync(0xffffffff, before + sum > start);
      if (beyond) {
        const int at = __ffs(beyond) - 1;
        before += __shfl_sync(0xffffffff, sum - mine * in_turn, at);
        const int32_t its_cost = __shfl_sync(0xffffffff, mine, at);
        const int32_t turn = (start - before) / its_cost;
        return {shares, worker, (batch + at) * call.batch_units.divisor + turn + sequence,
                start - before - turn * its_cost};
      }
      before += __shfl_sync(0xffffffff, sum, 31);
    }
  }
};

// Iterates over a worker's parts of units. Whole warps call its functions.
template <int kBlockKv>
struct DecodeWalk {
  int32_t unit, end_unit;
  int32_t step;       // from a unit to the next one
  int32_t remaining;  // tiles left
  int32_t first;      // first tile, counted in the unit

  __device__ __forceinline__ DecodeWalk(const DecodeCall& call, int32_t worker)
      : step(1), remaining(INT32_MAX), first(0) {
    const DecodePlan& plan = call.plan;
    if (plan.whole_units) {
      // Units with the same keys are neighbours. Workers take them at the same time, so that all
      // but one read the keys from L2.
      unit = worker;
      end_unit = plan.units;
      step = plan.workers;
    } else if (plan.parts) {
      unit = call.parts.quotient(worker);
      const int32_t part = worker - unit * call.parts.divisor;
      const DecodeShares shares = call.shares_of_unit<kBlockKv, true>();
      first = shares.start(part);
      set_end(shares, plan, part);
    } else {
      const DecodeStart start = DecodeStart::of<kBlockKv>(call, worker);
      unit = start.unit;
      first = start.first;
      step = plan.sequences;
      set_end(start.shares, plan, start.worker);
    }
  }

  __device__ __forceinline__ bool valid() const { return unit < end_unit && remaining > 0; }
  // Returns the worker's tiles of the unit, whose cost is `cost`, counted from the unit's first.
  __device__ __forceinline__ Range part(int32_t cost) const {
    return {first, first + min(remaining, cost - first)};
  }
  __device__ __forceinline__ void advance(const Range& part) {
    remaining -= part.end - part.first;
    first = 0;
    unit += step;
  }

 private:
  __device__ __forceinline__ void set_end(const DecodeShares& shares, const DecodePlan& plan,
                                          int32_t worker) {
    end_unit = plan.units;
    remaining = worker < shares.workers ? shares.share + (worker < shares.rest) : 0;
  }
};

}  // namespace jax_flash::sm90
