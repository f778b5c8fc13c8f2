// Computes products for head dims from 257 to 512, for the forward and backward kernels of
// sm90/forward/columns.cuh and sm90/backward/columns.cuh.
//
// A block owns 64 rows of one or two operands (`own`), and streams tiles of 64 rows of other
// operands. For each tile:
//   S = own streamed^T          64x64, over up to 512 columns; perhaps a second such product
//   P = a function of S         the pass decides: probabilities, or gradients of scores
//   sum += P streamed'          64x512 in float32: 128 KB, half of the registers
//
//   pass      own       streamed by rows   then by columns   P        sum
//   forward   Q         K                  V                 P        out
//   dV        K         Q                  dO                P^T      dV
//   dK        K and V   Q and dO           Q                 dS^T     dK
//   dQ        Q and dO  K and V            K                 dS       dQ
//
// Each of two consumer warpgroups owns 256 columns of `sum`, and computes S of every second tile.
// It writes P of its tiles to shared memory, from which the products of both warpgroups read it: P
// would take too many registers. A warpgroup repeats three products: S of its next own tile; that
// of the tile that the other one handed over, during which it computes P; and that of its own tile.
// Both warpgroups add tiles in the same order, which a running maximum needs. A warpgroup hands
// over a tile only when its product with the other one's last tile is complete, so that the other
// one may overwrite that tile.
//
// Streamed tiles arrive in chunks of 8 KB: 64 rows of 64 columns for S; 16 rows of a warpgroup's
// 256 columns for `sum`. Each consumer warpgroup has its own ring of chunks, which one producer
// warp fills. The two blocks of a cluster own neighbouring rows and stream the same tiles. Each
// block copies half of every chunk to both (multicast), so that L2 is read once for 128 rows.
//
// Shared memory: own operands, 64 KB each | a tile of P of each warpgroup | rings of chunks.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/fragments.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

inline constexpr int kColumnsHeadDim = 512, kColumnsRows = 64, kColumnsCluster = 2;

// kOwnOperands: the number of operands of which a block owns rows.
template <int kOwnOperands>
struct ColumnConfig {
  static constexpr int kOwn = kOwnOperands;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kSumCols = kColumnsHeadDim / 2;  // of a warpgroup

  using OwnTile = SmemTile<kColumnsRows, kColumnsHeadDim>;
  using HandedTile = SmemTile<kColumnsRows, kColumnsRows>;
  using FirstChunk = SmemTile<kColumnsRows, 64>;
  using SecondChunk = SmemTile<16, kSumCols>;
  static constexpr int kChunkBytes = FirstChunk::kBytes;
  static_assert(SecondChunk::kBytes == kChunkBytes);

  static constexpr int kHandedOffset = kOwn * OwnTile::kBytes;
  static constexpr int kRingOffset = kHandedOffset + 2 * HandedTile::kBytes;
  static constexpr int kStaticSmemBytes = 3072;  // most for barriers, statistics, the block
  static constexpr int kStages =
      (227 * 1024 - kStaticSmemBytes - kRingOffset) / (2 * kChunkBytes);  // of each ring
  // The number of chunks in use at a time: by the product that adds to `sum`, and by the others.
  static constexpr int kSecondChunks = kColumnsRows / 16, kChunksAtATime = 2;
  static_assert(kStages > kSecondChunks);
  static constexpr int kSmemBytes = kRingOffset + 2 * kStages * kChunkBytes;
};

// Returns a tile for matrix descriptors.
template <typename Tile>
__device__ __forceinline__ Tile in_own_block(Tile tile) {
  tile.root = ptx::without_block_rank(tile.root);
  return tile;
}

// Gives the addresses of a block's tiles and barriers.
template <typename Config>
struct ColumnSmem {
  static constexpr int kStages = Config::kStages;
  static constexpr int kBarriers = 2 + 4 * kStages;
  uint32_t root, barriers;

  __device__ __forceinline__ typename Config::OwnTile own(int operand) const {
    return {root, static_cast<uint32_t>(operand * Config::OwnTile::kBytes)};
  }
  __device__ __forceinline__ typename Config::HandedTile handed(int group) const {
    return {root,
            static_cast<uint32_t>(Config::kHandedOffset + group * Config::HandedTile::kBytes)};
  }
  __device__ __forceinline__ uint32_t chunk_offset(int group, uint32_t stage) const {
    return Config::kRingOffset + (group * kStages + stage) * Config::kChunkBytes;
  }
  __device__ __forceinline__ uint32_t own_full() const { return barriers; }
  __device__ __forceinline__ uint32_t handed_full() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t full(int group, uint32_t stage) const {
    return barriers + 16 + (group * kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int group, uint32_t stage) const {
    return full(2 + group, stage);
  }
  // Called by one thread.
  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(own_full(), 1);
    ptx::mbarrier_init(handed_full(), 128);
    for (int group = 0; group < 2; ++group) {
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(full(group, stage), 1);
        ptx::mbarrier_init(empty(group, stage), 4 * kColumnsCluster);  // warps
      }
    }
    ptx::fence_mbarrier_init();
  }
};

// Describes an operand whose rows are copied.
struct ColumnOperand {
  CUtensorMap map;
  BoxAxes axes;
  int32_t chunks;  // panels of 64 columns, an even number

  Status make(const char* name, const Shape& shape, const Operand& operand, bool of_queries,
              int32_t cols, int box_rows) {
    axes = BoxAxes(operand);
    chunks = (cols + 127) / 128 * 2;
    return make_tensor_map(name, shape, operand, of_queries ? shape.q_len : shape.kv_len,
                           of_queries ? shape.heads : shape.kv_heads, cols, box_rows, map);
  }
};

// Holds the operands: the block's own; those that are streamed by rows, for S (`first`); and the
// one that is streamed by columns, for `sum` (`second`).
template <int kOwn>
struct ColumnOperands {
  ColumnOperand own[kOwn], first[kOwn], second;
};

// Names a streamed tile: its head and its first row.
struct ColumnTile {
  int32_t head, row0;
};

// Describes what a block computes.
struct ColumnBlock {
  BatchIndex batch;
  Band band;
  int32_t batch_index, own_head, own_row0;
  int32_t first_head, first_tile, head_tiles;  // streamed: tiles of each head
  int32_t tiles;                               // of all heads

  // Finds the own rows; row0 is the cluster's first. `heads`: of the own operands, in a batch.
  __device__ __forceinline__ void start(const Forward& params, const TileSchedule& schedule,
                                        int32_t heads, int32_t& row0) {
    int32_t batch_head, tile;
    schedule.at(blockIdx.x / kColumnsCluster, batch_head, tile);
    batch_index = batch_head / heads;
    own_head = batch_head % heads;
    batch = BatchIndex(params.shape, batch_index);
    band = Band(params, batch);
    row0 = tile * kColumnsRows * kColumnsCluster;
    own_row0 = row0 + ptx::cluster_rank() * kColumnsRows;
  }
  __device__ __forceinline__ void stream(int32_t head, int32_t heads, const Range& range) {
    first_head = head;
    first_tile = range.first;
    head_tiles = max(range.end - range.first, 0);
    tiles = heads * head_tiles;
  }
  __device__ __forceinline__ ColumnTile at(int32_t index) const {
    const int32_t head = index / head_tiles;
    return {first_head + head, (first_tile + index - head * head_tiles) * kColumnsRows};
  }
};

// Copies the chunks of a consumer warpgroup in the order of its products. The producer of the first
// warpgroup also copies the block's own rows. Called by one thread.
template <typename Config>
struct ColumnProducer {
  const ColumnOperands<Config::kOwn>& operands;
  const ColumnSmem<Config>& smem;
  const ColumnBlock& block;
  int group;
  uint32_t rank = ptx::cluster_rank();
  uint32_t stage = 0, parity = 0;
  int32_t batch[kTensorMapBatchDims] = {static_cast<int32_t>(block.batch.coordinate[0]),
                                        static_cast<int32_t>(block.batch.coordinate[1])};

  __device__ __forceinline__ void load_own() const {
    int chunks = 0;
    for (int i = 0; i < Config::kOwn; ++i) chunks += operands.own[i].chunks;
    ptx::mbarrier_arrive_expect_tx(smem.own_full(), chunks * Config::OwnTile::kPanelBytes);
    for (int i = 0; i < Config::kOwn; ++i) {
      const ColumnOperand& operand = operands.own[i];
      for (int c = 0; c < operand.chunks; ++c) {
        load_box(smem.root + smem.own(i).offset + c * Config::OwnTile::kPanelBytes, operand.map,
                 smem.own_full(), operand.axes, batch, block.own_head, block.own_row0, c * 64);
      }
    }
  }

  // Copies this block's part of a chunk: box(row, column, bytes from the chunk's start).
  template <typename Boxes>
  __device__ __forceinline__ void load_chunk(const ColumnOperand& operand, const ColumnTile& tile,
                                             const Boxes& boxes) {
    ptx::mbarrier_wait(smem.empty(group, stage), parity ^ 1);
    const uint32_t full = smem.full(group, stage);
    ptx::mbarrier_arrive_expect_tx(full, Config::kChunkBytes);
    const uint32_t address = smem.root + smem.chunk_offset(group, stage);
    boxes([&](int row, int col, int bytes) {
      load_box_multicast(address + bytes, operand.map, full, (1 << kColumnsCluster) - 1,
                         operand.axes, batch, tile.head, tile.row0 + row, col);
    });
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void load_first(const ColumnOperand& operand, const ColumnTile& tile) {
    constexpr int kRows = kColumnsRows / kColumnsCluster;
    for (int c = 0; c < operand.chunks; ++c) {
      load_chunk(operand, tile, [&](auto box) { box(rank * kRows, c * 64, rank * kRows * 128); });
    }
  }
  __device__ __forceinline__ void load_second(const ColumnTile& tile) {
    using Chunk = typename Config::SecondChunk;
    constexpr int kPanels = Chunk::kPanels / kColumnsCluster;
    for (int c = 0; c < Config::kSecondChunks; ++c) {
      load_chunk(operands.second, tile, [&](auto box) {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
          const int panel = rank * kPanels + i;
          box(c * 16, group * Config::kSumCols + panel * 64, panel * Chunk::kPanelBytes);
        }
      });
    }
  }
  __device__ __forceinline__ void run() {
    if (block.tiles == 0) return;
    if (group == 0) load_own();
    for (int32_t n = group; n < block.tiles; n += 2) {
      load_first(operands.first[0], block.at(n));
      if (n > 0) load_second(block.at(n - 1));
      if (Config::kOwn == 2) load_first(operands.first[Config::kOwn - 1], block.at(n));
      load_second(block.at(n));
    }
    if ((block.tiles - 1) % 2 != group) load_second(block.at(block.tiles - 1));
  }
};

// Orders clusters. If they differ in length, those of several heads run together, in an order that
// starts with the longest, so that few multiprocessors are idle at the end.
inline TileSchedule column_schedule(const Forward& params, int64_t tiles, int64_t heads,
                                    bool last_longest) {
  const Options& options = params.options;
  if (!options.is_causal && options.window_left < 0 && options.window_right < 0) {
    return {tiles, heads, 1, false};
  }
  constexpr int64_t kTogether = 128;
  return {tiles, heads, std::clamp<int64_t>(kTogether / tiles, 1, heads), last_longest};
}

enum ColumnBarrier : int { kColumnsGroup = 1, kColumnsConsumers = 3 };  // kColumnsGroup + group

// Holds the state of a consumer warpgroup's products, which complete in order.
template <typename Config, typename Element>
struct ColumnConsumer {
  static constexpr int kN = kColumnsRows / 8, kSumN = Config::kSumCols / 8;
  using Scores = float[kN][4];
  using Sum = float[kSumN][4];

  const ColumnSmem<Config>& smem;
  const int group;
  uint32_t peer_empty;             // lanes 0 and 1: this barrier in each block of the cluster
  uint32_t stage = 0, parity = 0;  // of the next chunk
  uint32_t oldest = 0;             // the stage of the first chunk that is in use

  __device__ __forceinline__ ColumnConsumer(const ColumnSmem<Config>& tiles, int number)
      : smem(tiles), group(number) {
    peer_empty = ptx::address_in_block(smem.empty(group, 0), threadIdx.x % 32 % kColumnsCluster);
  }

  // Releases the chunks before stage `end`, whose products are complete. There must be at least
  // one.
  __device__ __forceinline__ void release(uint32_t end) {
    do {
      if (threadIdx.x % 32 < kColumnsCluster) {
        ptx::mbarrier_arrive_in_cluster(peer_empty + oldest * 8);
      }
      if (++oldest == Config::kStages) oldest = 0;
    } while (oldest != end);
  }
  // Waits for all products, and releases their chunks if there are `any`.
  __device__ __forceinline__ void retire(bool any = true) {
    ptx::wgmma_wait_group<0>();
    if (any) release(stage);
  }
  // Waits for the next chunk.
  template <typename Chunk>
  __device__ __forceinline__ Chunk await() const {
    ptx::mbarrier_wait(smem.full(group, stage), parity);
    return {smem.root, smem.chunk_offset(group, stage)};
  }
  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Computes d = own streamed^T, kChunksAtATime chunks at a time; the other warpgroup's products
  // run meanwhile. `chunks` is a multiple of kChunksAtATime: a branch among products makes ptxas
  // serialize them, and so does a wait for only some of them.
  __device__ __forceinline__ void multiply_first(Scores& d, typename Config::OwnTile own,
                                                 int chunks) {
    forget(d);
    if (Config::kStages < Config::kSecondChunks + Config::kChunksAtATime) retire(oldest != stage);
    for (int c = 0; c < chunks; c += Config::kChunksAtATime) {
      const uint32_t before = stage;
#pragma unroll
      for (int i = 0; i < Config::kChunksAtATime; ++i) {
        const auto chunk = await<typename Config::FirstChunk>();
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          ptx::Wgmma<Element, kColumnsRows>::template ss<0, 0>(
              d, operand_k_major(in_own_block(own), 0, k),
              operand_k_major(in_own_block(chunk), 0, k), i + k > 0 ? 1 : c);
        }
        advance();
        own.offset += Config::OwnTile::kPanelBytes;
      }
      ptx::wgmma_commit_group();
      // Chunks of the products before are released only after these products have been started.
      if (c > 0 && oldest != before) release(before);
      ptx::wgmma_wait_group<0>();
      if (c == 0) release(stage);
    }
    ptx::wgmma_wait_group<0>();  // for ptxas: without chunks, older products would still run
    ptx::wgmma_results(d);
    if (oldest != stage) release(stage);
  }

  // Starts sum += P streamed, with P of the tile of warpgroup `of_group`. Calls prepare(chunk, row)
  // before a chunk is read, whose rows begin at `row` of the tile.
  template <typename Prepare>
  __device__ __forceinline__ void start_second(Sum& sum, int of_group, const Prepare& prepare) {
    const auto p = in_own_block(smem.handed(of_group));
#pragma unroll
    for (int c = 0; c < Config::kSecondChunks; ++c) {
      const auto chunk = await<typename Config::SecondChunk>();
      prepare(chunk, c * 16);
      ptx::wgmma_fence();
      ptx::Wgmma<Element, Config::kSumCols>::template ss<0, 1>(
          sum, operand_k_major(p, 0, c), operand_mn_major(in_own_block(chunk), 0, 0), 1);
      advance();
    }
    ptx::wgmma_commit_group();
  }

  // Writes P for both warpgroups. A warp's products read only its own 16 rows. Each tile handed
  // over completes one phase of handed_full().
  __device__ __forceinline__ void hand_over(const Scores& p) const {
    uint32_t rounded[kN / 2][4];
    round_fragments<Element>(rounded, p);
    store_rounded(smem.handed(group), threadIdx.x % 128 / 32 * 16, 0, rounded, threadIdx.x % 32);
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(smem.handed_full());
    __syncwarp();
  }
  __device__ __forceinline__ void await_handed(int32_t tile) const {
    ptx::mbarrier_wait(smem.handed_full(), tile & 1);
  }
};

// Computes `sum` over all tiles of a block. The pass implements:
//   begin(index, tile)             is called before the tile's products start
//   weigh(tile, scores)            turns S into P
//   find_gradient(p, dp)           turns dP into dS, if that is what `sum` sums
//   rescale(sum)                   follows, when `sum` is complete up to the tile before
//   publish(), receive(sum)        are called before a tile is handed over, and by the other
//                                  warpgroup before it multiplies that tile
//   rows()                         the streamed rows that may be read; others may hold NaN
template <typename Config, typename Element, typename Pass>
__device__ __forceinline__ void consume_columns(const ColumnOperands<Config::kOwn>& operands,
                                                const ColumnBlock& block,
                                                ColumnConsumer<Config, Element>& consumer,
                                                typename ColumnConsumer<Config, Element>::Sum& sum,
                                                Pass& pass) {
  using Consumer = ColumnConsumer<Config, Element>;
  const auto& smem = consumer.smem;
  const int32_t tiles = block.tiles;
  clear(sum);
  if (tiles == 0) return;
  // Zeroes rows of a chunk that must not be read: they may hold NaN.
  const auto prepare = [&](int32_t row0) {
    const Range rows = pass.rows();
    const int32_t first = rows.first - row0, end = rows.end - row0;
    return [=, &consumer](const typename Config::SecondChunk& chunk, int row) {
      if (first > row || end < row + 16) {
        zero_rows(chunk, first - row, end - row, kColumnsGroup + consumer.group);
      }
    };
  };
  // kFollows: the other warpgroup has a tile before this one.
  const auto step = [&]<bool kFollows>(std::bool_constant<kFollows>, int32_t n) {
    const ColumnTile tile = block.at(n);
    pass.begin(n, tile);
    typename Consumer::Scores products[Config::kOwn];
    consumer.multiply_first(products[0], smem.own(0), operands.first[0].chunks);
    if constexpr (kFollows) {
      consumer.await_handed(n - 1);
      ptx::wgmma_results(sum);
      pass.receive(sum);
      consumer.start_second(sum, 1 - consumer.group, prepare(block.at(n - 1).row0));
    }
    pass.weigh(tile, products[0]);
    if constexpr (kFollows) {
      consumer.retire();
      ptx::wgmma_results(sum);
    }
    if constexpr (Config::kOwn == 2) {
      consumer.multiply_first(products[1], smem.own(1), operands.first[1].chunks);
      pass.find_gradient(products[0], products[1]);
    }
    pass.rescale(sum);
    ptx::wgmma_results(sum);  // the rescaling must not move past the next fence
    pass.publish();
    consumer.hand_over(products[Config::kOwn - 1]);
    consumer.start_second(sum, consumer.group, prepare(tile.row0));
  };
  ptx::mbarrier_wait(smem.own_full(), 0);
  int32_t n = consumer.group;
  if (n == 0) {
    step(std::false_type{}, 0);
    n = 2;
  }
  for (; n < tiles; n += 2) step(std::true_type{}, n);
  consumer.retire(consumer.group < tiles);
  ptx::wgmma_results(sum);
  if ((tiles - 1) % 2 != consumer.group) {
    consumer.await_handed(tiles - 1);
    pass.receive(sum);
    consumer.start_second(sum, 1 - consumer.group, prepare(block.at(tiles - 1).row0));
    consumer.retire();
    ptx::wgmma_results(sum);
  }
}

}  // namespace jax_flash::sm90
