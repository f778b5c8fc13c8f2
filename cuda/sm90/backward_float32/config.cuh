// Defines tile sizes and the shared-memory plans of Hopper's backward kernels for float32.
//
// Both kernels keep two tiles of kTileRows rows of the operands that a block owns, and read those
// of the other side into a ring of slots, each of which holds one tile, or a part of one.
//
// Above head dim 128, or 64 if operands are split, the two blocks of a cluster own the same rows.
// Each has half of the columns of all operands, and computes those of the gradients. Its products
// of rows, S and dP, are sums over its columns. The blocks therefore exchange these sums: each
// thread stores its own in the mailbox of the other block's same thread, and adds what it gets. A
// thread reads a mailbox of S before it sends dP, and one of dP before it sends the next S, so that
// no mailbox is overwritten before it has been read. (The memory model does not order these reads
// before the stores. But they are issued first, and the other block overwrites what they read at
// least a product later.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "plan/float32_tiles.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/split.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/ring.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm90 {

// kHeadDim: the columns of a block. kOwned: the number of operands that a block keeps. kSlotRows:
// rows of a tile in a slot. kClusterBlocks: the number of blocks that divide the columns.
// kSplitOperands: operands are split into float16 (sm90/split_tiles.cuh).
template <int kHeadDimension, int kOwned, int kSlotRows, int kClusterBlocks, bool kSplitOperands>
struct Float32BackwardConfig {
  static constexpr int kHeadDim = kHeadDimension, kRows = kSlotRows, kBlocks = kClusterBlocks;
  static constexpr bool kSplit = kSplitOperands;
  static constexpr int kTileRows = Float32Gradient::kTileRows;
  static constexpr int kTileFloats = kTileRows * kHeadDim;  // of a block's columns
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kOwnRows = kConsumers * kTileRows;  // that a block owns
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  using OwnTile = SmemTile<kTileRows, 2 * kHeadDim>;
  using SlotTile = SmemTile<kRows, 2 * kHeadDim>;
  using TransposedTile = std::conditional_t<kSplit, SlotTile, SmemTile<kHeadDim, 2 * kRows>>;
  static constexpr int kOwnBytes = OwnTile::kBytes, kSlotBytes = SlotTile::kBytes;
  static_assert(TransposedTile::kBytes == kSlotBytes);

  static constexpr int kMailOffset = kOwned * kConsumers * kOwnBytes;
  static constexpr int kMailBytes = kTileRows * kRows * 4;  // of a warpgroup's S or dP
  static constexpr int kMailPitch = 16 * kWarpgroup;        // each thread stores 16 bytes at a time
  static constexpr int kSlotsOffset = kMailOffset + (kBlocks > 1 ? 2 * kConsumers * kMailBytes : 0);
  // An upper bound. With 4,096 bytes at two blocks, only three slots would fit, and dK and dV need
  // four unless operands are split.
  static constexpr int kStaticBytes = kSplit ? 6144 : kBlocks > 1 ? 3072 : 4096;
  static constexpr int kFit = (kSmemLimit - kStaticBytes - kSlotsOffset) / kSlotBytes;
  static constexpr int kSlots = kFit < 8 ? kFit : 8;
  static constexpr int kSmemBytes = kSlotsOffset + kSlots * kSlotBytes;

  // Returns the number of this block in its cluster: it has columns from kHeadDim times that on.
  static __device__ __forceinline__ int32_t part() { return blockIdx.x % kBlocks; }
  static __device__ __forceinline__ int32_t first_col() { return part() * kHeadDim; }
  static constexpr int kTilePitch = kTileFloats + (kSplit ? kSplitRows : 0);
  // Returns the place of a tile's columns in the workspace.
  static __device__ __forceinline__ int64_t place(int64_t tile) {
    return (tile * kBlocks + part()) * kTilePitch;
  }
};

// Configures the instance of a head dim. At head dim 64, and for dQ of split operands, a slot has a
// whole tile of rows. Otherwise, it has half of one: K and V take more shared memory, and registers
// are scarce.
template <int kHeadDim, int kOwned, bool kSplit,
          int kBlocks = Float32Gradient::column_blocks(kHeadDim, kSplit)>
using Float32ConfigOf =
    Float32BackwardConfig<kHeadDim / kBlocks, kOwned,
                          (kHeadDim <= 64 || (kSplit && kOwned == 1) ? 64 : 32), kBlocks, kSplit>;

// Says what two blocks exchange.
enum class Float32Mail { kScores, kScoreGradients };

// Lays out static shared memory.
template <typename Config>
struct Float32BackwardNotes {
  alignas(16) float statistics[Config::kSlots][Config::kRows];  // of the rows in a slot: dK, dV
  alignas(16) Float32Keys keys[Config::kSlots];                 // of the keys in a slot: dQ
  uint64_t barriers[1 + 2 * Config::kSlots + (Config::kBlocks > 1 ? 2 * Config::kConsumers : 0)];
  // The magnitudes of the rows in the slots, if operands are split (ptx/split.cuh).
  alignas(16) float magnitudes[Config::kSplit ? Config::kSlots : 1][Config::kRows];
};

// Gives the addresses of a block's tiles and barriers. A `full` barrier completes its phase when a
// slot has been filled, an `empty` one when every consumer warp has finished with the slot.
template <typename Config>
struct Float32BackwardSmem {
  uint32_t root, barriers;
  float (*statistics)[Config::kRows];
  Float32Keys* keys;
  float (*magnitudes)[Config::kRows];

  __device__ __forceinline__ Float32BackwardSmem(uint32_t tiles,
                                                 Float32BackwardNotes<Config>& notes)
      : root(tiles),
        barriers(ptx::shared_address(notes.barriers)),
        statistics(notes.statistics),
        keys(notes.keys),
        magnitudes(notes.magnitudes) {}

  static __device__ __forceinline__ uint32_t own_offset(int operand, int group) {
    return static_cast<uint32_t>((operand * Config::kConsumers + group)) * Config::kOwnBytes;
  }
  __device__ __forceinline__ uint32_t slot_offset(uint32_t slot) const {
    return Config::kSlotsOffset + slot * Config::kSlotBytes;
  }
  // Returns the root of tiles for matrix descriptors.
  __device__ __forceinline__ uint32_t tiles() const {
    return Config::kBlocks > 1 ? ptx::without_block_rank(root) : root;
  }
  // Returns the tile of a warpgroup of the `operand`-th operand that the block owns.
  __device__ __forceinline__ typename Config::OwnTile own(int operand, int group) const {
    return {tiles(), own_offset(operand, group)};
  }
  __device__ __forceinline__ typename Config::SlotTile plain(uint32_t slot) const {
    return {tiles(), slot_offset(slot)};
  }
  __device__ __forceinline__ typename Config::TransposedTile transposed(uint32_t slot) const {
    return {tiles(), slot_offset(slot)};
  }
  // Return the places of this thread's mail, and of the barrier that waits for its warpgroup's.
  __device__ __forceinline__ uint32_t mail(Float32Mail kind) const {
    return root + Config::kMailOffset + mail_index(kind) * Config::kMailBytes +
           threadIdx.x % kWarpgroup * 16;
  }
  __device__ __forceinline__ uint32_t mail_full(Float32Mail kind) const {
    return mail_barrier(mail_index(kind));
  }
  // Waits for the slot `count` after a slot.
  __device__ __forceinline__ void await(const RingState<Config::kSlots>& slot, int count) const {
    const auto at = slot.next(count);
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }
  __device__ __forceinline__ uint32_t own_full() const { return barriers; }
  __device__ __forceinline__ uint32_t full(uint32_t slot) const { return barriers + 8 + slot * 8; }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const {
    return barriers + 8 + (Config::kSlots + slot) * 8;
  }

  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(own_full(), 1);
    for (uint32_t mail = 0; Config::kBlocks > 1 && mail < 2 * Config::kConsumers; ++mail) {
      ptx::mbarrier_init(mail_barrier(mail), 1);
    }
    for (uint32_t slot = 0; slot < Config::kSlots; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), Config::kConsumers * 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t mail_barrier(uint32_t index) const {
    return barriers + 8 + (2 * Config::kSlots + index) * 8;
  }
  static __device__ __forceinline__ uint32_t mail_index(Float32Mail kind) {
    return static_cast<int>(kind) * Config::kConsumers + threadIdx.x / kWarpgroup - 1;
  }
};

// Return a consumer's warpgroup, and its warp's first row among those that the block owns. They are
// computed wherever they are used, since registers are scarce.
__device__ __forceinline__ int consumer_group() { return threadIdx.x / kWarpgroup - 1; }
__device__ __forceinline__ int consumer_row() { return threadIdx.x / 32 * 16 - 64; }

// Returns the factors of products with this thread's two rows of its warpgroup's own tile of split
// operands. `from`: the first of the block's tiles, of which `count` exist.
template <typename Config>
__device__ __forceinline__ float2 own_factors(const float* from, int32_t count) {
  const int64_t tile = consumer_group() < count ? consumer_group() : 0;
  const float* const magnitudes =
      from + tile * Config::kBlocks * Config::kTilePitch + Config::kTileFloats;
  const int row = consumer_row() - consumer_group() * Config::kTileRows;
  return make_float2(magnitudes[row + fragment_row(0, 0)] * ptx::kSplitProduct,
                     magnitudes[row + fragment_row(0, 2)] * ptx::kSplitProduct);
}

// Sends a warpgroup's sums over this block's columns to the other block, if two blocks divide them.
template <typename Config, int kN>
__device__ __forceinline__ void send_sums(const Float32BackwardSmem<Config>& smem, Float32Mail kind,
                                          const float (&sums)[kN][4]) {
  if constexpr (Config::kBlocks > 1) {
    static_assert(kN * Config::kMailPitch == Config::kMailBytes);
    const uint32_t full = smem.mail_full(kind), other = Config::part() ^ 1;
    const uint32_t to = ptx::address_in_block(smem.mail(kind), other);
    const uint32_t to_full = ptx::address_in_block(full, other);
    if (threadIdx.x % kWarpgroup == 0) ptx::mbarrier_arrive_expect_tx(full, Config::kMailBytes);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float (&own)[4] = sums[n];
      ptx::st_async_v4(to + n * Config::kMailPitch,
                       make_uint4(__float_as_uint(own[0]), __float_as_uint(own[1]),
                                  __float_as_uint(own[2]), __float_as_uint(own[3])),
                       to_full);
    }
  }
}
// Adds the other block's sums. `parity`: that of the step's number.
template <typename Config, int kN>
__device__ __forceinline__ void receive_sums(const Float32BackwardSmem<Config>& smem,
                                             Float32Mail kind, uint32_t parity,
                                             float (&sums)[kN][4]) {
  if constexpr (Config::kBlocks > 1) {
    const uint32_t mail = smem.mail(kind);
    ptx::mbarrier_wait_cluster(smem.mail_full(kind), parity);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint4 words = ptx::ld_shared_v4(mail + n * Config::kMailPitch);
      sums[n][0] += __uint_as_float(words.x);
      sums[n][1] += __uint_as_float(words.y);
      sums[n][2] += __uint_as_float(words.z);
      sums[n][3] += __uint_as_float(words.w);
    }
  }
}

// Fills shared memory. Used by one thread.
template <typename Config>
struct Float32BackwardProducer {
  const Float32BackwardSmem<Config>& smem;
  RingState<Config::kSlots> slot;

  // Copies the block's own tiles of an operand: those from `from` on, `count` of which exist.
  __device__ __forceinline__ void load_own(int operand, const float* from, int32_t count) const {
#pragma unroll
    for (int group = 0; group < Config::kConsumers; ++group) {
      // A tile that does not exist is replaced by the first: its results are not stored.
      const int64_t tile = group < count ? group : 0;
      ptx::cp_async_bulk_load(smem.root + smem.own_offset(operand, group),
                              from + tile * Config::kBlocks * Config::kTilePitch, Config::kOwnBytes,
                              smem.own_full());
    }
  }

  // Copies rows from kRows * part on of a tile, and their statistics, if there are any.
  __device__ __forceinline__ void load_plain(const float* tile, int part,
                                             const float* statistics = nullptr) {
    const uint32_t full = begin(statistics ? Config::kRows * 4 : 0);
    copy_plain(tile, part, full);
    if (statistics) {
      ptx::cp_async_bulk_load(ptx::shared_address(smem.statistics[slot.stage]), statistics,
                              Config::kRows * 4, full);
    }
    slot.advance();
  }
  // Copies keys from kRows * part on of a tile, and the tile's bits.
  __device__ __forceinline__ void load_keys(const float* from, int part, const KeyBits* bits,
                                            int32_t step, bool last) {
    const uint32_t full = begin(sizeof(KeyBits), step, last);
    copy_plain(from, part, full);
    ptx::cp_async_bulk_load(ptx::shared_address(&smem.keys[slot.stage].bits), bits, sizeof(KeyBits),
                            full);
    slot.advance();
  }
  // Copies the same rows of a transposed tile, or, if operands are split, of one like the others.
  __device__ __forceinline__ void load_transposed(const float* tile, int part) {
    if constexpr (Config::kSplit) return load_plain(tile, part);
    const uint32_t full = begin(0);
    ptx::cp_async_bulk_load(smem.root + smem.slot_offset(slot.stage),
                            tile + part * (Config::kSlotBytes / 4), Config::kSlotBytes, full);
    slot.advance();
  }

 private:
  __device__ __forceinline__ void copy_plain(const float* tile, int part, uint32_t full) const {
    if constexpr (Config::kSplit) {
      ptx::cp_async_bulk_load(ptx::shared_address(smem.magnitudes[slot.stage]),
                              tile + Config::kTileFloats + part * Config::kRows, Config::kRows * 4,
                              full);
    }
    constexpr int kPiece = Config::kRows * 128, kPanel = Config::kTileRows * 128;
    const uint32_t to = smem.root + smem.slot_offset(slot.stage);
#pragma unroll
    for (int panel = 0; panel < Config::kSlotBytes / kPiece; ++panel) {
      ptx::cp_async_bulk_load(to + panel * kPiece, tile + (panel * kPanel + part * kPiece) / 4,
                              kPiece, full);
    }
  }
  // Waits for the slot, expects its bytes and `more_bytes`, and returns the barrier of its copies.
  __device__ __forceinline__ uint32_t begin(uint32_t more_bytes, int32_t step = 0,
                                            bool last = false) const {
    ptx::mbarrier_wait_asleep(smem.empty(slot.stage), slot.parity ^ 1);
    smem.keys[slot.stage].tile = step;
    smem.keys[slot.stage].last = last;
    constexpr int kBytes = Config::kSlotBytes + (Config::kSplit ? Config::kRows * 4 : 0);
    ptx::mbarrier_arrive_expect_tx(smem.full(slot.stage), kBytes + more_bytes);
    return smem.full(slot.stage);
  }
};

// Waits for all threads of the block, or of the cluster.
template <typename Config>
__device__ __forceinline__ void sync_blocks() {
  if constexpr (Config::kBlocks > 1) {
    __syncwarp();
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Runs a block. describe() is called by a whole warp and returns what the block works on, which is
// then in shared memory; produce(work, smem) is called by the first warp, consume(work, smem) by
// consumer warpgroups.
template <typename Config, typename Describe, typename Produce, typename Consume>
__device__ __forceinline__ void run_block(Describe describe, Produce produce, Consume consume) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ Float32BackwardNotes<Config> notes;
  __shared__ decltype(describe()) work;
  static_assert(sizeof(notes) + sizeof(work) <= Config::kStaticBytes);
  const Float32BackwardSmem<Config> smem(ptx::shared_address(dynamic), notes);
  if (threadIdx.x < 32) {
    const auto described = describe();
    if (threadIdx.x == 0) {
      work = described;
      smem.init_barriers();
    }
  }
  sync_blocks<Config>();
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) produce(work, smem);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(work, smem);
  }
  // No block ends while the other one sends to it.
  if constexpr (Config::kBlocks > 1) sync_blocks<Config>();
}

}  // namespace jax_flash::sm90
