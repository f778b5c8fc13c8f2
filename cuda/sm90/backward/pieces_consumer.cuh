// Implements the consumers of sm90/backward/narrow.cuh for head dims up to 192 with values of at
// most 128 columns, as in multi-head latent attention. Their steps have another order than those of
// narrow_consumer.cuh:
//
//   S^T = K Q^T                              64 query rows
//   P^T = 2^(scale log2(e) S^T - lse)        float32, in registers until dS^T is computed
//   for each half of the rows, 32
//     dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q
//   dQ = dS K of the tile before, in pieces: 64 columns of a consumer, then 32
//
// dK of 64 keys and 192 columns and dV of 128 columns take 160 registers. ptxas serializes products
// if more than 48 other registers are accumulators or operands at the same time. Therefore the
// consumer holds at most S^T or P^T and a half of dP^T, or a piece of dQ. It overlaps little of its
// own work, but the two consumers compute exponentials in turn, so that one's products overlap the
// other's exponentials.
//
// The shared memory is that of narrow.cuh, but has a single stage of dQ for each consumer. The
// second piece of dQ is computed while the first is copied from there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/score_gradient_transposed.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/modifiers.h"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/narrow_consumer.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/fragments.cuh"
#include "sm90/ring.cuh"

namespace jax_flash::sm90 {

// Implements the steps that differ for a consumer that computes in pieces; inherits all others.
template <typename Config, typename Element, bool kMayShare>
struct PiecesConsumer : NarrowConsumer<Config, Element, false, kMayShare> {
  using Base = NarrowConsumer<Config, Element, false, kMayShare>;
  using Base::Base, Base::block, Base::group, Base::params, Base::progress, Base::smem;
  using Base::kBlockQ, Base::kScaled;
  using Base::thread, Base::to_log2, Base::warp_key;
  using typename Base::KeySums, typename Base::KeyTile, typename Base::Operands;
  using typename Base::Rounded, typename Base::Tile, typename Base::ValueSums;
  using HalfTile = float[4][4];  // 64 keys by 32 query rows, or 64 rows by 32 columns of dQ
  using Ring = RingState<Config::kStages>;

  // Processes the key block: all its query tiles, then the results.
  __device__ __forceinline__ void run(Ring& ring, uint32_t key_parity, int& tiles_done) const {
    KeySums dkey;
    ValueSums dvalue;
    clear(dkey), clear(dvalue);
    const int tile_count = __reduce_max_sync(0xffffffff, block.tile_count);
    const UncutRows uncut = this->uncut_rows();
    if (tile_count == 0) return this->skip(key_parity, dkey, dvalue);
    ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
    int2 tile = smem.tiles[ring.stage];
    Operands no_rmem;  // K and V are in shared memory
    uint32_t allowed;
    Tile scores;
    const bool has_padding =
        this->begin(ring.stage, key_parity, tile, allowed, no_rmem, no_rmem, scores);
    while (true) {
      const uint32_t stage = ring.stage;
      this->start_scores(scores, no_rmem, stage, 0);
      ptx::mbarrier_wait(smem.dout_full(stage), ring.parity);
      this->zero_padding(smem.dout(stage), tile.x, has_padding);
      add_tile(stage, tile, uncut.cuts(tile.x), scores, dkey, dvalue);
      finish_tile(stage, dkey, dvalue);
      ring.advance();
      if (++tiles_done >= tile_count) break;
      ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
      tile = smem.tiles[ring.stage];
      this->zero_padding(smem.query(ring.stage), tile.x, has_padding);
    }
    finish(ring.stage ^ 1, dkey, dvalue);
  }

 private:
  // Adds a tile's part of dV and dK, and stores its dS^T. Its S^T has been started.
  __device__ __forceinline__ void add_tile(uint32_t stage, const int2& tile, bool is_cut,
                                           Tile& scores, KeySums& dkey, ValueSums& dvalue) const {
    const int32_t key0 = block.kv_tile * Config::kBlockKv + warp_key;
    const typename Base::Gradient gradient{params, block.batch, tile.y, key0, tile.x};
    const float* const lse_smem = smem.lse + stage * kBlockQ;
    const float* const delta_smem = smem.delta + stage * kBlockQ;
    HalfTile dscores;
    Rounded rounded;
    start_half(dscores, stage, 0);
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores);
    if (is_cut) gradient.mask(scores, block.band);
    ptx::barrier_sync(kMayCompute + group, Config::kConsumerThreads);
    gradient.probabilities(scores, ColumnsInShared(lse_smem), lse_smem, to_log2);
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& p = reinterpret_cast<const HalfTile&>(scores[half * 4]);
      auto& dscores_rounded = reinterpret_cast<uint32_t (&)[2][4]>(rounded[half * 2]);
      uint32_t probabilities[2][4];
      ptx::wgmma_results(dscores);
      const TransposedGradient<kNoModifier, 4, false, kScaled> half_gradient{
          params, block.batch, tile.y, key0, tile.x + half * 32};
      half_gradient.finish(p, dscores, nullptr, delta_smem + half * 32, {});
      round_fragments<Element>(probabilities, p);
      round_fragments<Element>(dscores_rounded, dscores);
      if (half == 0) {
        start_half(dscores, stage, 1);
        ptx::barrier_arrive(kMayCompute + (group ^ 1), Config::kConsumerThreads);
      }
      this->add_product(dvalue, probabilities, smem.dout(stage), half);
      this->add_product(dkey, dscores_rounded, smem.query(stage), half);
      ptx::wgmma_wait_group<1>();  // the next products need registers
    }
    // Waits for the other consumer's arrival. It has then also read the dS^T that is overwritten
    // here.
    this->await_dscores(stage ^ 1);
    store_rounded(smem.score(stage), warp_key, 0, rounded, thread % 32);
  }
  // Starts dP^T of 32 query rows.
  __device__ __forceinline__ void start_half(HalfTile& dscores, uint32_t stage, int half) const {
    const Operands no_rmem{};
    this->start_product(dscores, smem.value(), no_rmem, smem.dout(stage), half);
  }

  // Computes dQ of the tile before, while dV and dK are completed.
  __device__ __forceinline__ void finish_tile(uint32_t stage, KeySums& dkey,
                                              ValueSums& dvalue) const {
    Tile dquery;
    this->start_dquery(dquery, stage ^ 1);
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(dkey);
    ptx::wgmma_results(dvalue);
    sync_and_arrive_warp(smem.dout_empty(stage));
    sync_and_arrive_warp(smem.query_empty(stage));
    stage_dquery(dquery, stage ^ 1);
    // Notifies the other consumer that dS^T is stored, and that dS^T in the other stage has been
    // read.
    ptx::barrier_arrive(kScoresStored + group * 2 + stage, Config::kConsumerThreads);
  }
  // Computes dQ of the last tile, whose dS^T is in `stage`, and writes dK and dV.
  __device__ __forceinline__ void finish(uint32_t stage, KeySums& dkey, ValueSums& dvalue) const {
    Tile dquery;
    this->start_last_dquery(dquery, stage ^ 1);
    stage_dquery(dquery, stage);
    sync_and_arrive_warp(smem.keys_empty());
    ptx::mbarrier_wait(smem.dquery_empty(group, 1), stage);
    this->finish_sums(dkey, dvalue);
  }

  // Stages the first piece of dQ, whose product has been started, then computes and stages the
  // second.
  __device__ __forceinline__ void stage_dquery(Tile& first, uint32_t stage) const {
    ptx::wgmma_wait_group<0>();
    stage_piece(first, 0, stage);
    HalfTile second;
    KeyTile keys = smem.key();
    keys.offset += 2 * KeyTile::kPanelBytes + group * 64;
    this->start_dquery_of(second, stage, keys);
    ptx::wgmma_wait_group<0>();
    stage_piece(second, 1, stage);
  }
  // Stages a piece and notifies the warp that adds it. Both pieces use the same memory, so each
  // waits until the piece before has been copied from there. Each is copied once a tile, and the
  // ring has two stages, so the stage equals the parity of the number of tiles before.
  template <int kN>
  __device__ __forceinline__ void stage_piece(float (&dquery)[kN][4], int piece,
                                              uint32_t stage) const {
    ptx::wgmma_results(dquery);
    if (progress.tiles_done == 0) return;
    ptx::mbarrier_wait(smem.dquery_empty(group, piece ^ 1), piece == 0 ? stage ^ 1 : stage);
    stage_accumulators(smem.staging(group), dquery, thread % 128);
    ptx::barrier_arrive(kDqueryFull + group * 2 + piece, 128 + 32);
  }
};

// Runs a consumer on one key block: computes its dK and dV, and stages dQ of its query tiles.
template <typename Config, typename Element, bool kGeneral, bool kMayShare>
__device__ __forceinline__ void consume_tiles(
    const Backward& params, const KeyGradientMaps& maps, const BackwardWorkspace& workspace,
    const BlockPlan& plan, int32_t units, const BackwardSmem<Config>& smem,
    const BackwardBlock& block, RingState<Config::kStages>& ring, uint32_t key_parity) {
  // The shuffle makes the value uniform in the warp for the compiler, so that descriptors use
  // uniform registers.
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  int tiles_done = 0;
  const auto run = [&](auto mixed) {
    using Consumer =
        std::conditional_t<Config::kInPieces, PiecesConsumer<Config, Element, kMayShare>,
                           NarrowConsumer<Config, Element, kGeneral, kMayShare, mixed()>>;
    const typename Consumer::Progress progress{tiles_done};
    const Consumer consumer(params, maps, workspace, plan, units, smem, block, group, progress);
    consumer.run(ring, key_parity, tiles_done);
  };
  if constexpr (Config::kHasSegments) {
    if (__any_sync(0xffffffff, !block.alike.all)) return run(std::true_type{});
  }
  run(std::false_type{});
}

}  // namespace jax_flash::sm90
