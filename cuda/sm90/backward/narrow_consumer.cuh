// Implements the consumers of sm90/backward/narrow.cuh: they compute dK and dV of a key block, and
// stage dQ of its query tiles.
//
// A consumer starts the steps for 64 query rows in this order. BackwardConfig (config.cuh) changes
// it where registers do not suffice.
//
//   S^T = K Q^T, dP^T = V dO^T
//   P^T from S^T                    overlaps dP^T
//   dV += P^T dO
//   dS^T from P^T and dP^T          overlaps dV
//   dQ = dS K of the tile before
//   dK += dS^T Q
//   dS^T to shared memory
//   S^T of the next 64 rows         at once up to head dim 64, else after dK
//   dQ of the tile before, staged   overlaps dK, and the next S^T if that has started
//
// dQ is a tile late because it needs dS^T of all 128 keys: each consumer multiplies the keys of
// both, for 64 rows of dQ (tiles of 128 rows) or 64 columns (tiles of 64 rows).
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/distance.cuh"
#include "modifiers/score_gradient_transposed.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/bias.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/dropout.cuh"
#include "sm90/backward/mask.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/backward/split.cuh"
#include "sm90/fragments.cuh"
#include "sm90/key_mask.cuh"
#include "sm90/ring.cuh"
#include "tile/bad_key_rows.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Starts the copy of a tile to rows row0... of a head, from column col0 on. Called by one thread.
// Rows beyond the end of the operand are not written.
template <typename Tile>
__device__ __forceinline__ void store_tile_panels(const Tile& tile, const CUtensorMap& map,
                                                  const Operand& operand, const BatchIndex& batch,
                                                  int32_t head, int32_t row0, int32_t col0 = 0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::cp_async_bulk_tensor_store_5d(
        map, tile.root + tile.offset + panel * Tile::kPanelBytes, col0 + panel * 64,
        tensor_map_coordinate(operand.row, row0), tensor_map_coordinate(operand.head, head),
        tensor_map_coordinate(operand.batch[0], batch.coordinate[0]),
        tensor_map_coordinate(operand.batch[1], batch.coordinate[1]));
  }
}

// Replaces TransposedSlope in calls without ALiBi slopes.
struct NoSlope {
  __device__ __forceinline__ void begin(const Forward&, const BatchIndex&, int32_t) {}
  template <typename Gradient, typename Scores, typename Columns>
  __device__ __forceinline__ void probabilities(const Gradient& gradient, Scores& scores,
                                                const Columns& lse, const float* lse_smem,
                                                float to_log2) const {
    gradient.probabilities(scores, lse, lse_smem, to_log2);
  }
  template <typename Gradient, typename Scores>
  __device__ __forceinline__ void add(const Gradient&, const Scores&) {}
  __device__ __forceinline__ void finish(const Backward&, const BatchIndex&, int32_t, float) {}
};

// Holds the range of tiles of 64 rows, given by their first rows, in which no pair is masked.
struct UncutRows {
  int32_t first, last;

  __device__ __forceinline__ bool cuts(int32_t row) const { return row < first || row > last; }
};

// Holds the state of a consumer warpgroup and implements the steps of its work. A query tile of 128
// rows is processed in halves of 64 rows. All threads call every function. Arrays in registers are
// passed as arguments: a struct that contained them would stay in memory, with all its members,
// until the compiler has unrolled the loops over them.
//
//   key_rmem, value_rmem   K and V, if they are in registers
//   scores                 S^T, then P^T
//   dscores                dP^T, then dS^T
//   dkey, dvalue           sums of the block
//
// kMixed: the block's keys and rows have several segments. Such blocks have their own copy of the
// code, because a loop for both kinds of blocks would need too many registers.
template <typename Config, typename Element, bool kGeneral, bool kMayShare, bool kMixed = false>
struct NarrowConsumer {
  static constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv;
  static constexpr bool kManyRegisters = Config::kHeadDim <= 96;  // chosen by measurement
  static constexpr bool kScaled = kScaledDlogits<Element> && !Config::kHasDropout;
  // Modifiers that TransposedGradient applies: not the mask, whose bits are read ahead.
  static constexpr uint32_t kApplied = kGeneral           ? kEveryModifier & ~kMask
                                       : Config::kHasBias ? kBias
                                                          : kNoModifier;
  // True if any pair may be forbidden.
  static constexpr bool kForbids = kApplied != kNoModifier || Config::kHasMask || kMixed;
  static constexpr int kHalves = kBlockQ / 64;
  static constexpr int kHeadN = Config::kHeadDim / 8, kHeadSteps = Config::kHeadDim / 16;
  using KeyTile = typename Config::KeyTile;
  using QueryTile = typename Config::QueryTile;
  using Tile = float[8][4];  // 64 keys by 64 query rows, of the warpgroup
  using KeySums = float[kHeadN][4];
  using ValueSums = float[Config::kValueDim / 8][4];
  using Rounded = uint32_t[4][4];
  using Operands = uint32_t[kHeadSteps][4];
  using Gradient = TransposedGradient<kApplied, 8, kManyRegisters, kScaled>;
  using Slope = std::conditional_t<Config::kHasSlopes, TransposedSlope, NoSlope>;
  using Drops = std::conditional_t<Config::kHasDropout, TransposedDropout, NoDropout>;
  using Words = typename Drops::Words;
  using Bias = std::conditional_t<Config::kHasBias, TransposedBias<Config, Element>, NoBias>;

  struct Progress {
    const int& tiles_done;
  };

  const Backward& params;
  const KeyGradientMaps& maps;
  const BackwardWorkspace& workspace;
  const BlockPlan& plan;
  const int32_t units;  // of heads: see BackwardCounters
  const BackwardSmem<Config>& smem;
  const BackwardBlock& block;  // read again at each use: registers are scarce
  // These members and that of Progress are references on purpose. They decide in which order the
  // compiler numbers the registers of the main loop, and ptxas allocates registers in that order:
  // copies would change the machine code.
  const int& group;
  const Progress& progress;
  const int thread, warp_key;
  const int dquery_row, dquery_col;
  const float to_log2;
  const bool copies;  // true in the thread that starts the copies of dK and dV

  __device__ __forceinline__ NarrowConsumer(const Backward& params, const KeyGradientMaps& maps,
                                            const BackwardWorkspace& workspace,
                                            const BlockPlan& plan, int32_t units,
                                            const BackwardSmem<Config>& smem,
                                            const BackwardBlock& block, const int& group,
                                            const Progress& progress)
      : params(params),
        maps(maps),
        workspace(workspace),
        plan(plan),
        units(units),
        smem(smem),
        block(block),
        group(group),
        progress(progress),
        thread(kept_thread_index()),
        warp_key(group * 64 + threadIdx.x % 128 / 32 * 16),
        dquery_row(Config::kDqueryByRows ? group * 64 : 0),
        dquery_col(Config::kDqueryByRows ? 0 : group * 64),
        to_log2(params.options.scale * kLog2E),
        copies(threadIdx.x % 128 == 0) {}

  __device__ __forceinline__ int32_t first_key() const { return block.kv_tile * kBlockKv; }

  // Processes the key block: all its query tiles, then the results.
  __device__ __forceinline__ void run(RingState<Config::kStages>& ring, uint32_t key_parity,
                                      int& tiles_done) const {
    KeySums dkey;
    ValueSums dvalue;
    clear(dkey), clear(dvalue);
    // The maxima make these values uniform for the compiler. The loop keeps them, and all else that
    // it can, in registers: reads of shared memory, too, wait behind products.
    const int tile_count = __reduce_max_sync(0xffffffff, block.tile_count);
    UncutRows uncut = uncut_rows();
    if (tile_count == 0) return skip(key_parity, dkey, dvalue);
    ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
    int2 tile = smem.tiles[ring.stage];
    Operands key_rmem, value_rmem;
    uint32_t allowed = ~0u;  // by the mask, of the next 64 rows
    Slope slope;
    slope.begin(params, block.batch, tile.y);
    Drops drops;
    drops.begin(params, block.batch, tile.y);
    Tile scores, dscores, dquery;
    Words words;
    const bool has_padding =
        begin(ring.stage, key_parity, tile, allowed, key_rmem, value_rmem, scores);
    if constexpr (kMixed) restrict_to_alike(uncut);
    if (Config::kNextScoresFirst) drops.draw(words, tile.x, first_key() + warp_key);
    do {
      const int32_t row0 = tile.x;
      const uint32_t stage = ring.stage;
      if constexpr (!Config::kNextScoresFirst) start_scores(scores, key_rmem, stage, 0);
      ptx::mbarrier_wait(smem.dout_full(stage), ring.parity);
      zero_padding(smem.dout(stage), row0, has_padding);
      start_dprobabilities(dscores, value_rmem, stage, 0);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        CapSlopes<8> slopes;
        const uint32_t mask_bits = allowed;
        if (half + 1 < kHalves) read_ahead(allowed, tile, half + 1);
        const Gradient gradient{params, block.batch, tile.y, first_key() + warp_key,
                                row0 + half * 64};
        const float* lse_smem = smem.lse + stage * kBlockQ + half * 64;
        const float* delta_smem = smem.delta + stage * kBlockQ + half * 64;
        const typename Config::LseColumns lse(lse_smem);
        const bool is_cut = cuts(uncut, row0 + half * 64);
        if (!Config::kNextScoresFirst || half > 0) drops.draw(words, gradient.row0, gradient.key0);
        // P^T, overlapped with dP^T; then dV += P^T dO
        Bias bias;
        await_scores(ring, bias, scores, half);
        mask_scores(gradient, mask_bits, bias, scores, is_cut, slopes);
        if (Config::kEarlyDquery && half == 0) start_last_dquery(dquery, stage);
        Rounded probabilities, rounded;
        const Kept kept = gradient.draw();
        find_probabilities(slope, words, gradient, mask_bits, lse, lse_smem, scores, probabilities,
                           is_cut);
        if (Config::kEarlyDvalue) add_product(dvalue, probabilities, smem.dout(stage), half);
        // dS^T, overlapped with dV; then dK += dS^T Q
        find_dscores(gradient, half, lse_smem, delta_smem, kept, slopes, scores, dscores);
        if (!Config::kEarlyDvalue) add_late_dvalue(dvalue, gradient, kept, scores, stage, half);
        slope.add(gradient, dscores);
        round_fragments<Element>(rounded, dscores);
        if (!Config::kEarlyDquery && half == 0) start_last_dquery(dquery, stage);
        add_product(dkey, rounded, smem.query(stage), half);
        store_rounded(smem.score(stage), warp_key, half, rounded, thread % 32);
        if (half + 1 < kHalves) {
          start_half(scores, dscores, dquery, key_rmem, value_rmem, ring, half + 1);
        }
      }
      // Starts S^T of the next tile. After the last tile, this computes S^T of an old stage, which
      // is discarded.
      ring.advance();
      if (tiles_done + 1 < tile_count) {
        await_query(ring, tile, has_padding, allowed, slope, drops);
      }
      if constexpr (Config::kNextScoresFirst) {
        start_scores(scores, key_rmem, ring.stage, 0);
        drops.draw(words, tile.x, first_key() + warp_key);
      }
      finish_step(stage, ring, scores, dquery, dkey, dvalue);
      ++tiles_done;
    } while (tiles_done < tile_count);
    finish_slope(slope, tile.y);
    finish(ring, dquery, dkey, dvalue);
  }

  // Returns the tiles of rows that no edge of the band cuts.
  __device__ __forceinline__ UncutRows uncut_rows() const {
    const int32_t group_key = first_key() + group * 64;
    const auto unmasked = block.band.template unmasked_tiles<64>(group_key, group_key + 64);
    return {__reduce_max_sync(0xffffffff, unmasked.first),
            __reduce_max_sync(0xffffffff, unmasked.last)};
  }
  // Returns whether elements of 64 rows are forbidden. Rows beyond the end get a bias, too, perhaps
  // NaN.
  __device__ __forceinline__ bool cuts(const UncutRows& uncut, int32_t row) const {
    bool cut = uncut.cuts(row);
    if (Config::kHasBias) cut |= row + 64 > block.band.q_len;
    return cut;
  }
  // Restricts the range to rows whose segment is that of all keys. If a key is NaN or infinite, no
  // row remains: every tile has to mark such keys.
  __device__ __forceinline__ void restrict_to_alike(UncutRows& uncut) const {
    const bool has_bad_keys = bad_keys()[kBlockKv / 32] != 0;
    const int32_t first = has_bad_keys ? INT32_MAX : block.alike.first;
    uncut.first = max(uncut.first, __reduce_max_sync(0xffffffff, first));
    uncut.last = min(uncut.last, __reduce_max_sync(0xffffffff, block.alike.last));
  }

  // Writes zeros for a block that no row may attend to.
  __device__ __forceinline__ void skip(uint32_t key_parity, KeySums& dkey,
                                       ValueSums& dvalue) const {
    // Waits before arriving, so that the producer warp has seen the end of the phase before:
    // without the wait, it would miss that phase.
    ptx::mbarrier_wait(smem.key_full(), key_parity);
    ptx::mbarrier_wait(smem.value_full(), key_parity);
    sync_and_arrive_warp(smem.keys_empty());
    await_copies();
    ptx::griddepcontrol_wait();  // for zeroed counters
    finish_sums(dkey, dvalue);
  }

  // Waits for K, V and the first Q, and prepares them. If kNextScoresFirst, also computes the first
  // S^T. Returns true if query tiles may have rows to be zeroed.
  __device__ __forceinline__ bool begin(uint32_t stage, uint32_t key_parity, const int2& tile,
                                        uint32_t& allowed, Operands& key_rmem, Operands& value_rmem,
                                        Tile& scores) const {
    const Band& band = block.band;
    // Zeroes keys and values that no row may attend to.
    int32_t first = max(0, band.lo) - first_key();
    int32_t end = min(band.kv_len, band.q_len - 1 + band.hi) - first_key();
    if constexpr (Config::kHasSegments && !kMixed) {  // no segments are compared
      const Range& visited = block.walk.range;        // no other rows have the block's segment
      first = max(first, visited.first * kBlockQ + band.lo - first_key());
      end = min(end, visited.end * kBlockQ - 1 + band.hi - first_key());
    }
    const bool has_unattended =
        first > 0 || (end < kBlockKv && first_key() + end < params.shape.kv_len);
    ptx::mbarrier_wait(smem.key_full(), key_parity);
    if (has_unattended) zero_rows<Config::kConsumerThreads>(smem.key(), first, end, kConsumers);
    if constexpr (Config::kHasKeyMask) {
      allowed = read_key_mask(tile.y);
      zero_forbidden(smem.key());
    }
    if constexpr (kForbids) {
      clear_bad_key_rows<Config::kConsumerThreads, Element>(smem.key(), bad_keys(),
                                                            threadIdx.x - 128, kConsumers);
    }
    const bool has_padding = kApplied != kNoModifier || band.q_len < params.shape.q_len;
    read_ahead(allowed, tile, 0);
    zero_padding(smem.query(stage), tile.x, has_padding);
    if constexpr (Config::kKeysInRegisters) load_fragments(key_rmem, smem.key(), warp_key);
    if constexpr (Config::kNextScoresFirst) start_scores(scores, key_rmem, stage, 0);
    await_copies();
    ptx::mbarrier_wait(smem.value_full(), key_parity);
    if (has_unattended) zero_rows<Config::kConsumerThreads>(smem.value(), first, end, kConsumers);
    if constexpr (Config::kHasKeyMask) zero_forbidden(smem.value());
    if constexpr (Config::kKeysInRegisters) load_fragments(value_rmem, smem.value(), warp_key);
    if constexpr (Config::kNextScoresFirst) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(scores);
    }
    return has_padding;
  }

  // Reads the mask of the block's keys. Returns bits for forbid_key_rows().
  __device__ __forceinline__ uint32_t read_key_mask(int32_t head) const {
    const int row = threadIdx.x - 128;
    if (row < kBlockKv) {
      const int32_t key = first_key() + row;
      const auto* mask = block.batch.template pointer<const uint8_t>(params.mask, head);
      const bool is_allowed = key >= params.shape.kv_len || mask[key * params.mask.col] != 0;
      const uint32_t word = __ballot_sync(0xffffffff, is_allowed);
      if (row % 32 == 0) allowed_keys()[row / 32] = word;
    }
    ptx::barrier_sync(kConsumers, Config::kConsumerThreads);
    const int key = warp_key + fragment_row(0, 0);
    return allowed_keys()[key / 32] >> key % 32 & kTwoKeys;
  }
  // Zeroes the rows of a tile that the mask of keys forbids: they may hold NaN, and NaN times 0 is
  // not 0.
  template <typename Tile>
  __device__ __forceinline__ void zero_forbidden(const Tile& tile) const {
    uint32_t all = ~0u;
#pragma unroll
    for (int i = 0; i < kBlockKv / 32; ++i) all &= allowed_keys()[i];
    if (all == ~0u) return;
    for (int index = threadIdx.x - 128; index < Tile::kBytes / 16;
         index += Config::kConsumerThreads) {
      const int row = index % (Tile::kPanelBytes / 16) / 8;
      if (!(allowed_keys()[row / 32] >> row % 32 & 1)) {
        ptx::st_shared_v4(tile.root + tile.offset + index * 16, uint4{});
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kConsumers, Config::kConsumerThreads);
  }
  // Holds a bit for each key of the block that a mask of keys allows.
  static __device__ __forceinline__ uint32_t* allowed_keys() {
    __shared__ uint32_t allowed_keys_smem[Config::kHasKeyMask ? kBlockKv / 32 : 1];
    return allowed_keys_smem;
  }

  // Waits for the ring's next Q and prepares it.
  __device__ __forceinline__ void await_query(const RingState<Config::kStages>& ring, int2& tile,
                                              bool has_padding, uint32_t& allowed, Slope& slope,
                                              Drops& drops) const {
    ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
    const int32_t head = tile.y;
    tile = smem.tiles[ring.stage];
    if (Config::kHasSlopes && tile.y != head) {
      finish_slope(slope, head);
      slope.begin(params, block.batch, tile.y);
    }
    if (Config::kHasDropout && tile.y != head) drops.begin(params, block.batch, tile.y);
    read_ahead(allowed, tile, 0);
    zero_padding(smem.query(ring.stage), tile.x, has_padding);
  }

  __device__ __forceinline__ void finish_slope(Slope& slope, int32_t head) const {
    slope.finish(params, block.batch, head, kScaled ? 1.0f / params.options.scale : 1.0f);
  }

  // Start S^T = K Q^T and dP^T = V dO^T for 64 rows of a stage.
  __device__ __forceinline__ void start_scores(Tile& scores, const Operands& key_rmem,
                                               uint32_t stage, int half) const {
    start_product(scores, smem.key(), key_rmem, smem.query(stage), half);
  }
  __device__ __forceinline__ void start_dprobabilities(Tile& dscores, const Operands& value_rmem,
                                                       uint32_t stage, int half) const {
    start_product(dscores, smem.value(), value_rmem, smem.dout(stage), half);
  }
  // Starts S^T and dP^T of the tile's next 64 rows. Before the second half, hands dQ of the tile
  // before to the warp that adds it.
  __device__ __forceinline__ void start_half(Tile& scores, Tile& dscores, Tile& dquery,
                                             const Operands& key_rmem, const Operands& value_rmem,
                                             const RingState<Config::kStages>& ring,
                                             int half) const {
    start_scores(scores, key_rmem, ring.stage, half);
    if (half == 1) {
      ptx::wgmma_wait_group<2>();
      stage_dquery(dquery, ring.stage ^ 1, ring.parity ^ ring.stage);
    }
    start_dprobabilities(dscores, value_rmem, ring.stage, half);
  }
  // Starts d = a b^T, for a of 64 keys and b of 8 kN query rows.
  template <int kN, typename TileA, typename TileB>
  __device__ __forceinline__ void start_product(float (&d)[kN][4], const TileA& a,
                                                const Operands& a_rmem, const TileB& b,
                                                int half) const {
    using Product = ptx::Wgmma<Element, kN * 8>;
    forget(d);
    const auto a_rows = unknown_address(a);
    const auto b_rows = unknown_address(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < TileA::kCols / 16; ++k) {
      if constexpr (Config::kKeysInRegisters) {
        Product::template rs<0>(d, a_rmem[k], operand_k_major(b_rows, half * kN * 8, k), k > 0);
      } else {
        Product::template ss<0, 0>(d, operand_k_major(a_rows, group * 64, k),
                                   operand_k_major(b_rows, half * kN * 8, k), k > 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  // Waits for the bias, and for S^T, unless finish_step() or begin() already has.
  __device__ __forceinline__ void await_scores(const RingState<Config::kStages>& ring, Bias& bias,
                                               Tile& scores, int half) const {
    bias.read(*this, ring, half);
    if (!Config::kNextScoresFirst || half > 0) {
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_results(scores);
    }
  }
  // Applies modifiers and the band to S^T.
  __device__ __forceinline__ void mask_scores(const Gradient& gradient, uint32_t mask_bits,
                                              const Bias& bias, Tile& scores, bool is_cut,
                                              CapSlopes<8>& slopes) const {
    if constexpr (kForbids && (!kMixed || Config::kHasBias)) {
      mark_bad_key_rows<kBlockKv>(scores, bad_keys(), warp_key);
    }
    if constexpr (Config::kHasMask) apply_mask_bits(scores, mask_bits);
    if constexpr (Config::kHasKeyMask) forbid_key_rows(scores, mask_bits);
    if constexpr (Config::kHasBias) {
      bias.add_to(scores, params.options.scale);
      // Behind the bias, which may be NaN or infinite where segments differ.
      if constexpr (kMixed) {
        if (is_cut) separate_segments(scores, gradient.row0);
      }
      if (is_cut) mask_band_transposed(scores, block.band, gradient.key0, gradient.row0);
    } else if (kApplied != kNoModifier || is_cut) {
      if constexpr (kMixed) {
        mark_bad_key_rows<kBlockKv>(scores, bad_keys(), warp_key);
        separate_segments(scores, gradient.row0);
      }
      gradient.mask(scores, block.band, kManyRegisters ? &slopes : nullptr);
      if (kGeneral && params.mask) apply_mask_bits(scores, mask_bits);
    }
  }
  __device__ __forceinline__ void separate_segments(Tile& scores, int32_t row) const {
    const SegmentSpans& spans = workspace.spans;
    const int64_t keys = int64_t{block.batch_index} * spans.key_blocks * kSegmentBlock;
    const int32_t* key_ids = spans.key_ids + keys + first_key() + warp_key + fragment_row(0, 0);
    const int64_t rows = int64_t{block.batch_index} * spans.query_blocks * kSegmentBlock;
    separate_transposed(scores, spans.query_ids + rows + row, {key_ids[0], key_ids[8]});
  }
  // Turns S^T into P^T. If kEarlyDvalue, also rounds P^T, and then lets the other consumer compute
  // its exponentials.
  __device__ __forceinline__ void find_probabilities(const Slope& slope, const Words& words,
                                                     const Gradient& gradient, uint32_t mask_bits,
                                                     const typename Config::LseColumns& lse,
                                                     const float* lse_smem, Tile& scores,
                                                     Rounded& probabilities, bool is_cut) const {
    if constexpr (Config::kEarlyDvalue) {
      ptx::barrier_sync(kMayCompute + group, Config::kConsumerThreads);
    }
    if constexpr (Config::kHasSoftCap) {
      const bool has_forbidden =
          is_cut || (Config::kHasMask && __any_sync(0xffffffff, mask_bits != ~0u));
      CapModifier<Element>::probabilities(scores, probabilities, lse, plan.soft_cap, has_forbidden);
    } else if constexpr (Config::kHasDropout) {
      Drops::probabilities(scores, words, lse, to_log2);
    } else {
      slope.probabilities(gradient, scores, lse, lse_smem, to_log2);
    }
    if constexpr (Config::kEarlyDvalue) {
      if constexpr (Config::kHasDropout) {
        Drops::template round<Element>(probabilities, scores);
      } else if constexpr (!Config::kHasSoftCap) {
        round_fragments<Element>(probabilities, scores);
      }
      ptx::wgmma_fence();  // keeps exponentials before the arrival
      ptx::barrier_arrive(kMayCompute + (group ^ 1), Config::kConsumerThreads);
    }
  }
  // Waits for dP^T and turns it into dS^T.
  __device__ __forceinline__ void find_dscores(const Gradient& gradient, int half,
                                               const float* lse_smem, const float* delta_smem,
                                               const Kept& kept, const CapSlopes<8>& slopes,
                                               const Tile& scores, Tile& dscores) const {
    if (Config::kEarlyDquery && half == 0) {
      static_assert(!Config::kEarlyDquery || !Config::kEarlyDvalue);
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<Config::kEarlyDvalue>();
    }
    ptx::wgmma_results(dscores);
    if constexpr (Config::kHasDropout) {
      return Drops::template finish<kForbids>(scores, dscores, delta_smem);
    }
    gradient.template finish<kForbids>(scores, dscores, lse_smem, delta_smem, kept,
                                       kManyRegisters ? &slopes : nullptr);
  }

  // Starts sum += a b, for a of 64 keys and b of 16 kSteps query rows. The sum is dV, with P^T dO,
  // or dK, with dS^T Q.
  template <int kN, int kSteps, typename TileB>
  __device__ __forceinline__ void add_product(float (&sum)[kN][4], const uint32_t (&a)[kSteps][4],
                                              const TileB& b, int half) const {
    const auto b_rows = unknown_address(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::Wgmma<Element, kN * 8>::template rs<1>(
          sum, a[k], operand_mn_major(b_rows, 0, half * kSteps + k), 1);
    }
    ptx::wgmma_commit_group();
  }

  // Rounds P^T and starts dV += P^T dO, unless kEarlyDvalue: then dV comes before dS^T.
  __device__ __forceinline__ void add_late_dvalue(ValueSums& dvalue, const Gradient& gradient,
                                                  const Kept& kept, Tile& scores, uint32_t stage,
                                                  int half) const {
    Rounded probabilities;
    gradient.drop(scores, kept);
    round_fragments<Element>(probabilities, scores);
    add_product(dvalue, probabilities, smem.dout(stage), half);
  }

  // Starts dQ = dS K of the tile before, whose dS^T is in the other stage. Before the first tile,
  // this multiplies the stage's undefined contents, and the result is discarded: with a branch
  // around the product, the compiler would wait for products.
  __device__ __forceinline__ void start_last_dquery(Tile& dquery, uint32_t stage) const {
    await_dscores(stage ^ 1);
    start_dquery(dquery, stage ^ 1);
  }
  // Waits for the other consumer's dS^T.
  __device__ __forceinline__ void await_dscores(uint32_t stage) const {
    if (progress.tiles_done > 0) {
      ptx::barrier_sync(kScoresStored + (group ^ 1) * 2 + stage, Config::kConsumerThreads);
    }
    ptx::fence_proxy_async_shared();  // also before the first tile: saves a branch
  }
  __device__ __forceinline__ void start_dquery(Tile& dquery, uint32_t stage) const {
    start_dquery_of(dquery, stage, smem.key());
  }
  // Starts dQ = dS K for as many columns as `dquery` has, from the thread's first column on.
  template <int kN>
  __device__ __forceinline__ void start_dquery_of(float (&dquery)[kN][4], uint32_t stage,
                                                  const KeyTile& keys) const {
    forget(dquery);
    const auto a = unknown_address(smem.score(stage));
    const auto b = unknown_address(keys);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockKv / 16; ++k) {
      ptx::Wgmma<Element, kN * 8>::template ss<1, 1>(
          dquery, operand_mn_major(a, dquery_row, k),
          operand_mn_major(b, kN == 8 ? dquery_col : 0, k), k > 0);
    }
    ptx::wgmma_commit_group();
  }
  // Stages finished dQ and notifies the warp that adds it to the sums.
  __device__ __forceinline__ void stage_dquery(Tile& dquery, uint32_t stage,
                                               uint32_t empty_parity) const {
    ptx::wgmma_results(dquery);
    if (progress.tiles_done == 0) return;
    if constexpr (Config::kStagingStages == 1) {  // waits for the copy of the tile before
      ptx::mbarrier_wait(smem.dquery_empty(group, stage ^ 1), empty_parity ^ stage);
    } else {
      ptx::mbarrier_wait(smem.dquery_empty(group, stage), empty_parity);
    }
    stage_accumulators(smem.dquery_staging(group, stage), dquery, thread % 128);
    ptx::barrier_arrive(kDqueryFull + group * 2 + stage, 128 + 32);
  }

  __device__ __forceinline__ void finish_step(uint32_t stage,
                                              const RingState<Config::kStages>& ring, Tile& scores,
                                              Tile& dquery, KeySums& dkey,
                                              ValueSums& dvalue) const {
    ptx::wgmma_wait_group<1 + Config::kNextScoresFirst>();
    if constexpr (kHalves == 1) stage_dquery(dquery, ring.stage, ring.parity);
    sync_and_arrive_warp(smem.dout_empty(stage));
    ptx::barrier_arrive(kScoresStored + group * 2 + stage, Config::kConsumerThreads);
    ptx::wgmma_wait_group<0>();
    if constexpr (Config::kNextScoresFirst) ptx::wgmma_results(scores);
    ptx::wgmma_results(dkey);
    ptx::wgmma_results(dvalue);
    sync_and_arrive_warp(smem.query_empty(stage));
  }
  // Computes dQ of the last tile, and writes dK and dV.
  __device__ __forceinline__ void finish(const RingState<Config::kStages>& ring, Tile& dquery,
                                         KeySums& dkey, ValueSums& dvalue) const {
    start_last_dquery(dquery, ring.stage);
    ptx::wgmma_wait_group<0>();
    sync_and_arrive_warp(smem.keys_empty());
    stage_dquery(dquery, ring.stage ^ 1, ring.parity ^ ring.stage);
    // Both stages are reused for dK and dV: waits until dQ of the last two tiles has been copied.
    ptx::mbarrier_wait(smem.dquery_empty(group, ring.stage), ring.parity ^ 1);
    ptx::mbarrier_wait(smem.dquery_empty(group, ring.stage ^ 1), ring.parity ^ ring.stage ^ 1);
    finish_sums(dkey, dvalue);
  }

  // Reads modifiers of the next 64 rows ahead: loads the mask into a register and, if there are
  // registers for addresses, prefetches a bias to L2.
  __device__ __forceinline__ void read_ahead(uint32_t& allowed, const int2& tile, int half) const {
    if constexpr (kForbids && !kMixed) {
      const int32_t key = first_key() + warp_key, row = tile.x + half * 64;
      if (key >= params.shape.kv_len) return;
      if (Config::kHasMask || (kGeneral && params.mask)) {
        allowed = plan.mask_words.load(block.batch, tile.y, row, key);
      }
      if (kGeneral && kManyRegisters && params.bias) {
        prefetch_bias(params, block.batch, tile.y, row, key);
      }
    }
  }

  // Zeroes the rows of an arrived tile that are beyond the end of the sequence. Rows beyond the end
  // of the operand are zero already: the copy engine fills them.
  template <typename Rows>
  __device__ __forceinline__ void zero_padding(const Rows& rows_smem, int32_t row0,
                                               bool has_padding) const {
    if (has_padding && row0 + kBlockQ > block.band.q_len) {
      zero_rows(rows_smem, 0, block.band.q_len - row0, kBackwardZeroed + group);
    }
  }

  // Returns the flags of keys that are NaN or infinite: see tile/bad_key_rows.cuh.
  static __device__ __forceinline__ uint32_t* bad_keys() {
    __shared__ uint32_t bad_keys_smem[kForbids ? kBlockKv / 32 + 1 : 1];
    return bad_keys_smem;
  }

  // Waits until bulk copies of dK and dV have read the staging memory. They are staged where dQ is,
  // and one thread of each consumer starts the copies.
  __device__ __forceinline__ void await_copies() const {
    if (copies) ptx::cp_async_bulk_wait_group_read<0>();
    ptx::barrier_sync(kBackwardZeroed + group, 128);
  }
  __device__ __forceinline__ void write_key_gradients(KeySums& dkey, ValueSums& dvalue) const {
    const typename Config::GradientTile dkey_smem{smem.staging(group * 2), 0};
    const typename Config::GradientTile dvalue_smem{smem.staging(group * 2 + 1), 0};
    const int row = threadIdx.x % 128 / 32 * 16;
    const Options& options = params.options;
    float dkey_scale = kScaled ? 1.0f : options.scale;
    if constexpr (Config::kHasDropout) dkey_scale = dropout_scales(options).dquery;
    store_sums<Element>(dkey_smem, row, dkey_scale, dkey);
    store_sums<Element>(dvalue_smem, row, Config::kHasDropout ? options.dropout_scale : 1.0f,
                        dvalue);
    ptx::barrier_sync(kBackwardZeroed + group, 128);
    const int32_t row0 = first_key() + group * 64;
    // If the operand has a single row, the maps have no axis for it, and any index would address
    // this row. Rows beyond the end are therefore excluded here.
    if (!copies || row0 >= params.shape.kv_len) return;
    ptx::fence_proxy_async_shared();
    store_tile_panels(dkey_smem, maps.dkey, params.dkey, block.batch, block.kv_head, row0);
    store_tile_panels(dvalue_smem, maps.dvalue, params.dvalue, block.batch, block.kv_head, row0);
    ptx::cp_async_bulk_commit_group();
  }
  // Writes dK or dV, one panel of 64 columns after the other.
  template <int kN>
  __device__ __forceinline__ void write_panels(float (&sums)[kN][4], float scale,
                                               const CUtensorMap& map,
                                               const Operand& operand) const {
    using Panel = typename Config::GradientTile;
    const int32_t row0 = first_key() + group * 64;
    const auto write = [&](auto& own, int panel) {
      const Panel staged{smem.staging(group) + panel % 2 * Panel::kBytes, 0};
      if (panel % 2 == 0) await_copies();
      store_sums<Element>(staged, threadIdx.x % 128 / 32 * 16, scale, own);
      ptx::barrier_sync(kBackwardZeroed + group, 128);
      if (!copies || row0 >= params.shape.kv_len) return;
      ptx::fence_proxy_async_shared();
      store_tile_panels(staged, map, operand, block.batch, block.kv_head, row0, panel * 64);
      ptx::cp_async_bulk_commit_group();
    };
#pragma unroll
    for (int panel = 0; panel < kN / 8; ++panel) {
      write(reinterpret_cast<float (&)[8][4]>(sums[panel * 8]), panel);
    }
    // Copies do not store the columns of the last panel that are beyond the head dim.
    if constexpr (kN % 8 != 0)
      write(reinterpret_cast<float (&)[kN % 8][4]>(sums[kN / 8 * 8]), kN / 8);
  }
  // Writes dK and dV. If the key block is divided and another thread block completes its sums, adds
  // them to these sums instead.
  __device__ __forceinline__ void finish_sums(KeySums& dkey, ValueSums& dvalue) const {
    if constexpr (kMayShare) {
      const int32_t weight = __reduce_max_sync(0xffffffff, block.sum.weight);
      const int32_t total = __reduce_max_sync(0xffffffff, block.sum.total);
      const int32_t index = __reduce_max_sync(0xffffffff, block.sum.index);
      if (weight != total) {
        const SplitSums sums{plan.split.sums, BackwardCounters{workspace.counters, units}.sums(),
                             group, kBackwardZeroed + group,
                             smem.staging(group * Config::kStagingStages)};
        if (!sums.add_up({index, weight, total}, dkey, dvalue)) return;
      }
    }
    if constexpr (Config::kWritesPanels) {
      write_panels(dvalue, 1.0f, maps.dvalue, params.dvalue);
      write_panels(dkey, kScaled ? 1.0f : params.options.scale, maps.dkey, params.dkey);
    } else {
      write_key_gradients(dkey, dvalue);
    }
  }
};

}  // namespace jax_flash::sm90
