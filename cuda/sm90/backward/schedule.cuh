// Prepares the launches of the sm_90 backward kernels on the host: tensor maps, the order of key
// blocks, their division among thread blocks, and the work of neighbouring kernels that the main
// kernel takes over (zeros before, conversion of dQ after).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "params.h"
#include "plan/divisor.h"
#include "plan/remembered.h"
#include "sm90/backward/config.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/sections.h"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Makes tensor maps for tiles of block_q query rows and block_kv keys.
inline Status make_backward_maps(const Backward& params, int block_q, int block_kv,
                                 BackwardMaps& maps) {
  const Shape& shape = params.shape;
  const Status status = make_forward_maps(params, block_q, block_kv, maps);
  if (!status.ok()) return status;
  return make_tensor_map("dout", shape, params.dout, shape.q_len, shape.heads, shape.value_dim,
                         block_q, maps.dout);
}

inline Status make_gradient_maps(const Backward& params, int rows, KeyGradientMaps& maps) {
  const Shape& shape = params.shape;
  const Status status = make_tensor_map("dkey", shape, params.dkey, shape.kv_len, shape.kv_heads,
                                        shape.head_dim, rows, maps.dkey);
  if (!status.ok()) return status;
  return make_tensor_map("dvalue", shape, params.dvalue, shape.kv_len, shape.kv_heads,
                         shape.value_dim, rows, maps.dvalue);
}

// Returns the costs of the blocks of one head, in the order in which they run: the number of rows
// of the other operand that the band allows for the block's rows, in units of 64 rows, and three to
// begin and end the block. Blocks own `block` rows: keys, or queries from the last to the first.
inline std::vector<int32_t> block_costs(const Backward& params, bool of_keys, int block) {
  const Shape& shape = params.shape;
  const Band band(params.options, shape.q_len, shape.kv_len, 0);
  const int64_t length = of_keys ? shape.kv_len : shape.q_len;
  const int64_t other = of_keys ? shape.q_len : shape.kv_len;
  std::vector<int32_t> costs;
  for (int64_t begin = 0; begin < length; begin += block) {
    const int64_t last = std::min(begin + block, length) - 1;
    const int64_t first_row = begin + (of_keys ? 1 - band.hi : band.lo);
    const int64_t end_row = last + (of_keys ? 1 - band.lo : band.hi);
    const int64_t rows = std::min(end_row, other) - std::max<int64_t>(first_row, 0);
    costs.push_back(static_cast<int32_t>(ceil_div(std::max<int64_t>(rows, 0), 64) + 3));
  }
  if (!of_keys) std::reverse(costs.begin(), costs.end());
  return costs;
}

// Orders blocks so that those of one head run at the same time and share its rows in L2. If blocks
// differ in length, as under a causal mask, sections of several heads run together, and each
// section starts with its long blocks: otherwise, the long blocks of the last head would start when
// the others end. Blocks own `block` keys, or queries.
inline TileSchedule make_schedule(const Backward& params, bool of_keys, int block, int64_t heads,
                                  int64_t head_bytes, int32_t multiprocessors) {
  const Options& options = params.options;
  const int64_t tiles = ceil_div(of_keys ? params.shape.kv_len : params.shape.q_len, block);
  const bool uneven = banded(options);
  int64_t section = 1;
  if (uneven && JAX_FLASH_SM90_BWD_LONGEST_FIRST && tiles > 0 && heads > 0) {
    static Remembered<int64_t, 10> sections;
    section = sections.get(
        {params.shape.q_len, params.shape.kv_len, options.is_causal, options.window_left,
         options.window_right, of_keys, block, heads, head_bytes, multiprocessors},
        [&] {
          return heads_of_section(block_costs(params, of_keys, block), heads, head_bytes,
                                  multiprocessors);
        });
  }
  return {tiles, heads, section, uneven && !of_keys};
}

// Orders blocks that take turns. A section has at most `blocks` blocks, and all sections have about
// the same size. Every other section is reversed, so that a thread block that had a long block gets
// a short one next.
inline TileSchedule make_turn_schedule(const Backward& params, int64_t tiles, int64_t total_heads,
                                       int64_t blocks) {
  const int64_t most = std::clamp<int64_t>(blocks / tiles, 1, total_heads);
  const int64_t sections = ceil_div(total_heads, most);
  TileSchedule schedule(tiles, total_heads, ceil_div(total_heads, sections), false);
  schedule.alternates = banded(params.options);
  return schedule;
}

// Holds the launch parameters of the kernel in narrow.cuh.
struct KeyBlocks {
  TileSchedule schedule;
  TurnOrder order = TurnOrder::kNone;
  int64_t launched = 0;
};

// Chooses the order of key blocks and the number of thread blocks to launch for them. `turns`:
// blocks add dQ in turns (deterministic runs). For units of heads, see BackwardCounters.
template <typename Config>
KeyBlocks divide_keys(const Backward& params, int32_t heads_of_unit, bool turns, int sms) {
  const Shape& shape = params.shape;
  const int64_t tiles = ceil_div(shape.kv_len, Config::kBlockKv);
  const int64_t heads = shape.batch * (shape.heads / heads_of_unit), total = tiles * heads;
  KeyBlocks blocks;
  const bool counted = total <= INT32_MAX;
  blocks.launched = counted ? std::min<int64_t>(total, sms) : total;
  if (!turns || !counted) {
    const int64_t row_bytes = 4 * (Config::kHeadDim + Config::kDqueryCols);
    blocks.schedule = make_schedule(params, true, Config::kBlockKv, heads,
                                    int64_t{shape.q_len} * heads_of_unit * row_bytes, sms);
    return blocks;
  }
  const bool fits = tiles <= sms && tiles * ceil_div(shape.q_len, Config::kBlockQ) < INT32_MAX;
  blocks.order = fits ? TurnOrder::kTogether : TurnOrder::kAscending;
  blocks.schedule = make_turn_schedule(params, tiles, heads, fits ? sms : total);
  if (fits) blocks.launched = blocks.schedule.section_blocks.divisor;
  return blocks;
}

// Plans the conversion of dQ in the main kernel. There is none if few heads are complete before the
// last blocks begin.
inline EndPlan plan_ends(const Backward& params, const GradientScales& scales,
                         const KeyBlocks& blocks, int32_t heads_of_unit, bool may) {
  const Shape& shape = params.shape;
  const TileSchedule& schedule = blocks.schedule;
  EndPlan ends;
  ends.units = schedule.total_heads;
  const int64_t total = int64_t{schedule.tiles} * schedule.total_heads;
  const int64_t of_head = ceil_div(shape.q_len, 64), tiles = shape.batch * shape.heads * of_head;
  if (!may || blocks.launched * 2 >= total || tiles > INT32_MAX / 64 ||
      blocks.launched > kMaxPersistentBlocks) {
    return ends;
  }
  ends.blocks = static_cast<int32_t>(blocks.launched);
  ends.tiles = static_cast<int32_t>(tiles);
  ends.additions = 2 * schedule.tiles;
  ends.tiles_of_head = Divisor(static_cast<int32_t>(of_head));
  ends.tiles_of_unit = Divisor(static_cast<int32_t>(of_head * heads_of_unit));
  ends.q_len = shape.q_len;
  ends.head_dim = shape.head_dim;
  ends.scale = scales.dquery;
  ends.heads = HeadDivisors(shape, shape.heads);
  ends.dquery = RowsOperand(params.dquery);
  return ends;
}

// Divides key blocks (SplitPlan). If query heads of a group have separate key blocks, these share
// keys in any case. If may_split:
//   parts   if at least half of the multiprocessors would have no key block. They are not made so
//           small that it takes longer to begin and to add them up than to compute them.
//   chunks  if all key blocks are equally long, and the others would wait for the last ones longer
//           than it takes to begin and add up chunks
template <typename Config>
SplitPlan plan_split(const Backward& params, const BackwardWorkspace& workspace, int sms,
                     KeyBlocks& blocks, EndPlan& ends, bool may_split) {
  static_assert(Config::kBlockKv == kSplitKeys);
  constexpr int64_t kLeastOfPart = 2, kLeastOfChunk = 4, kLeastGain = 5;  // tiles
  const Shape& shape = params.shape;
  const Options& options = params.options;
  const int64_t total = int64_t{blocks.schedule.tiles} * blocks.schedule.total_heads;
  const int32_t heads_of_unit = workspace.heads_of_key_block;
  SplitPlan split;
  split.sharing = Divisor(shape.heads / shape.kv_heads / heads_of_unit);
  split.sums = split.sharing.divisor > 1 ? workspace.group_sums : workspace.split_sums;
  split.kv_heads = shape.kv_heads;
  split.key_tiles = blocks.schedule.tiles;
  if (!may_split || workspace.split_sums == nullptr || blocks.order != TurnOrder::kNone ||
      blocks.launched > kSplitBlocks) {
    return split;
  }
  const int64_t tiles = ceil_div(shape.q_len, Config::kBlockQ) * heads_of_unit;
  const int64_t parts = std::min(std::min(sms, kSplitBlocks) / total, tiles / kLeastOfPart);
  if (parts > 1) {
    split.parts = Divisor(static_cast<int32_t>(parts));
    blocks.launched *= parts;
    return split;
  }
  const bool even = !options.is_causal && options.window_left < 0 && options.window_right < 0 &&
                    !params.query_seq_lengths && !params.key_value_seq_lengths;
  const int64_t divided = total % blocks.launched;
  const int64_t chunk = std::max(ceil_div(divided * tiles, blocks.launched), kLeastOfChunk);
  if (!even || blocks.launched == total || divided == 0 || chunk + kLeastGain > tiles ||
      total * tiles > INT32_MAX / 2) {
    return split;
  }
  split.first = static_cast<int32_t>(total - divided);
  split.tiles = static_cast<int32_t>(divided * tiles);
  split.chunks = static_cast<int32_t>(ceil_div(split.tiles, chunk));
  split.chunk_tiles = Divisor(static_cast<int32_t>(chunk));
  split.block_tiles = Divisor(static_cast<int32_t>(tiles));
  ends.additions *= static_cast<int32_t>(tiles);
  return split;
}

// Plans the shares of zeros. Shares are contiguous, unit by unit. The elements of a unit must be a
// multiple of kStoreFloats, the number that a warp stores at a time. Shares are written a section
// ahead. This cannot deadlock: if a block waits for a share, the thread block that writes it has
// taken its own block before the waiting one, or at the same time, and waits only for earlier
// blocks itself.
template <typename Config>
ZeroPlan plan_zeros(const Shape& shape, const BackwardWorkspace& workspace,
                    const KeyBlocks& blocks) {
  const TileSchedule& schedule = blocks.schedule;
  const int64_t total = int64_t{schedule.tiles} * schedule.total_heads;
  ZeroPlan zeros;
  if (workspace.turns || blocks.launched >= total) return zeros;
  const int64_t ahead = schedule.section_blocks.divisor + blocks.launched / 8;
  const int64_t first_unit = ceil_div(blocks.launched + ahead, schedule.tiles);
  constexpr int kStoreFloats = 128;
  const int64_t elements =
      int64_t{workspace.heads_of_key_block} * workspace.dquery_rows * shape.head_dim;
  const int64_t unit_stores = elements / kStoreFloats;
  if (elements % kStoreFloats != 0 || first_unit >= schedule.total_heads ||
      unit_stores + schedule.tiles > INT32_MAX) {
    return zeros;
  }
  zeros.first_unit = static_cast<int32_t>(first_unit);
  zeros.ahead = static_cast<int32_t>(ahead);
  zeros.unit_stores = static_cast<int32_t>(unit_stores);
  zeros.share = static_cast<int32_t>(ceil_div(unit_stores, schedule.tiles));
  return zeros;
}

}  // namespace jax_flash::sm90
