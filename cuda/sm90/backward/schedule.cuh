// Prepares the launches of the sm_90 backward kernels on the host: tensor maps, the order of key
// blocks, their division among thread blocks, and the work of neighbouring kernels that the main
// kernel takes over (zeros before, conversion of dQ after).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "params.h"
#include "sm90/backward/config.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "status.h"
#include "tile/launch.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Makes tensor maps for tiles of block_q query rows and block_kv keys.
inline Status make_backward_maps(const Backward& params, int block_q, int block_kv,
                                 BackwardMaps& maps) {
  const Shape& shape = params.shape;
  Status status = make_tensor_map("query", shape, params.query, shape.q_len, shape.heads,
                                  shape.head_dim, block_q, maps.query);
  if (status.ok()) {
    status = make_tensor_map("key", shape, params.key, shape.kv_len, shape.kv_heads, shape.head_dim,
                             block_kv, maps.key);
  }
  if (status.ok()) {
    status = make_tensor_map("value", shape, params.value, shape.kv_len, shape.kv_heads,
                             shape.value_dim, block_kv, maps.value);
  }
  if (status.ok()) {
    status = make_tensor_map("dout", shape, params.dout, shape.q_len, shape.heads, shape.value_dim,
                             block_q, maps.dout);
  }
  return status;
}

inline Status make_gradient_maps(const Backward& params, int rows, KeyGradientMaps& maps) {
  const Shape& shape = params.shape;
  const Status status = make_tensor_map("dkey", shape, params.dkey, shape.kv_len, shape.kv_heads,
                                        shape.head_dim, rows, maps.dkey);
  if (!status.ok()) return status;
  return make_tensor_map("dvalue", shape, params.dvalue, shape.kv_len, shape.kv_heads,
                         shape.value_dim, rows, maps.dvalue);
}

// Orders blocks so that those of one head run at the same time and share its rows in L2. If blocks
// differ in length, as under a causal mask, sections of several heads run together, and each
// section starts with its long blocks: otherwise, the long blocks of the last head would start when
// the others end. A section has `waves` blocks for each multiprocessor, or one wave less if L2
// (half of 50 MB) does not hold so many heads. The last section must not be much smaller than the
// others, because its long blocks would also start when the others end. `row_bytes`: the bytes that
// a block reads and adds to for each row of the other operand.
inline TileSchedule make_schedule(const Backward& params, int64_t tiles, int64_t total_heads,
                                  int64_t rows, int64_t row_bytes, int waves, bool last_first) {
  const Options& options = params.options;
  const bool uneven = options.is_causal || options.window_left >= 0 || options.window_right >= 0;
  int64_t section = 1;
  if (uneven && JAX_FLASH_SM90_BWD_LONGEST_FIRST) {
    const auto heads_of = [&](int blocks) {
      return std::clamp<int64_t>(128 * blocks / std::max<int64_t>(tiles, 1), 1,
                                 std::max<int64_t>(total_heads, 1));
    };
    section = heads_of(waves);
    if (waves > 1 && section * rows * row_bytes > int64_t{25} << 20) section = heads_of(waves - 1);
    const auto leaves_few = [&](int64_t heads) {
      return total_heads % heads != 0 && 2 * (total_heads % heads) < heads;
    };
    for (int64_t heads = section; 2 * heads > section; --heads) {
      if (leaves_few(heads)) continue;
      section = heads;
      break;
    }
  }
  return {tiles, total_heads, section, uneven && last_first};
}

// Orders blocks that take turns. A section has at most `blocks` blocks, and all sections have about
// the same size. Every other section is reversed, so that a thread block that had a long block gets
// a short one next.
inline TileSchedule make_turn_schedule(const Backward& params, int64_t tiles, int64_t total_heads,
                                       int64_t blocks) {
  const int64_t most = std::clamp<int64_t>(blocks / tiles, 1, total_heads);
  const int64_t sections = ceil_div(total_heads, most);
  const Options& options = params.options;
  TileSchedule schedule(tiles, total_heads, ceil_div(total_heads, sections), false);
  schedule.alternates = options.is_causal || options.window_left >= 0 || options.window_right >= 0;
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
    blocks.schedule = make_schedule(params, tiles, heads, int64_t{shape.q_len} * heads_of_unit,
                                    4 * (Config::kHeadDim + Config::kDqueryCols), 2, false);
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
  ends.dquery = EdgeOperand(params.dquery);
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
// multiple of kUnit, the number that a warp stores at a time. Shares are written a section ahead.
// This cannot deadlock: if a block waits for a share, the thread block that writes it has taken its
// own block before the waiting one, or at the same time, and waits only for earlier blocks itself.
template <typename Config>
ZeroPlan plan_zeros(const Shape& shape, const BackwardWorkspace& workspace,
                    const KeyBlocks& blocks) {
  const TileSchedule& schedule = blocks.schedule;
  const int64_t total = int64_t{schedule.tiles} * schedule.total_heads;
  ZeroPlan zeros;
  if (workspace.turns || blocks.launched >= total) return zeros;
  const int64_t ahead = schedule.section_blocks.divisor + blocks.launched / 8;
  const int64_t first_unit = ceil_div(blocks.launched + ahead, schedule.tiles);
  constexpr int kUnit = 128;
  const int64_t elements =
      int64_t{workspace.heads_of_key_block} * workspace.dquery_rows * shape.head_dim;
  const int64_t of_unit = elements / kUnit;
  if (elements % kUnit != 0 || first_unit >= schedule.total_heads ||
      of_unit + schedule.tiles > INT32_MAX) {
    return zeros;
  }
  zeros.first_unit = static_cast<int32_t>(first_unit);
  zeros.ahead = static_cast<int32_t>(ahead);
  zeros.of_unit = static_cast<int32_t>(of_unit);
  zeros.share = static_cast<int32_t>(ceil_div(of_unit, schedule.tiles));
  return zeros;
}

}  // namespace jax_flash::sm90
