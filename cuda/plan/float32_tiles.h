// Decides which calls take Hopper's kernels for float32 (sm90/forward_float32,
// sm90/backward_float32), and lays out tiles of their operands (sm90/float32_tiles.cuh,
// sm90/split_tiles.cuh). Also defines KeyBits, which kernels of 16-bit calls share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/divisor.h"
#include "plan/modifiers.h"
#include "plan/tensor_map.h"

namespace jax_flash::sm90 {

// Holds the bits of a tile's keys. Bit 2 n + e of word w is key 8 n + 2 w + e: a thread's columns
// are those of word threadIdx.x % 4.
struct KeyBits {
  uint32_t words[4];

  JAX_FLASH_HOST_DEVICE bool has(int key) const {
    return words[key % 8 / 2] >> (key / 8 * 2 + key % 2) & 1;
  }
};

// Returns the head dim of the instance that takes a call.
inline int32_t float32_head_dim(const Shape& shape) {
  const int32_t widest = std::max(shape.head_dim, shape.value_dim);
  return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

// Below, `split` says whether products are as exact as those of float32: each number is then split
// into two of float16 (ptx/split.cuh). This is the greatest head dim of such kernels.
inline constexpr int32_t kMaxSplitHeadDim = 128;

// kFloat32Elements are the modifiers of smaller kernels, which are faster; kFloat32Modifiers are
// all that any of these kernels takes (sm90/float32_logits.cuh).
inline constexpr uint32_t kFloat32Elements = kBias | kMask | kAnyScale;
inline constexpr uint32_t kFloat32Modifiers = kFloat32Elements | kSoftCap | kDropout | kDistance;

// Returns the modifiers of the kernel that takes a call. A mask alone that all queries of a group
// share does not count: the tiles' kernel leaves out the keys that it forbids.
inline uint32_t float32_modifiers(const Forward& params) {
  const uint32_t modifiers = modifiers_of(params);
  if (modifiers == kMask && key_block_has_one_mask(params)) return kNoModifier;
  if (modifiers == kNoModifier) return kNoModifier;
  return (modifiers & ~kFloat32Elements) == 0 ? kFloat32Elements : kFloat32Modifiers;
}

// Names the kinds of calls. Each needs another number of keys: see least_float32_keys() and
// least_split_operand_keys().
enum class Float32Call { kPlain, kKeyMask, kModified };

inline Float32Call float32_call(const Forward& params) {
  if (float32_modifiers(params) != kNoModifier) return Float32Call::kModified;
  return params.mask ? Float32Call::kKeyMask : Float32Call::kPlain;
}

// Returns how many keys the middle query attends to, by causal order and a window whose sizes are
// known. If there is an offset, the last query is assumed to have the last key's position.
inline int64_t attended_keys(const Forward& params) {
  const Options& options = params.options;
  const int64_t queries = params.shape.q_len, keys = params.shape.kv_len;
  const int64_t before = params.query_offset ? std::max<int64_t>(keys - queries, 0) : 0;
  const int64_t middle = before + std::min(queries, keys) / 2;  // the position of the middle query
  const int64_t left = options.window_left, right = options.is_causal ? 0 : options.window_right;
  const int64_t first = left < 0 ? 0 : std::max<int64_t>(middle - left, 0);
  const int64_t end = right < 0 ? keys : std::min(middle + right, keys);
  return std::max<int64_t>(end - first, 0);
}

// Says from how many keys on the kernels of a pass are faster than those of the sm_80 family.
// `keys`: the least S. `attended`: the least number of keys that a query attends to, and of rows
// that read each key. The numbers were measured on an H200 (sm90/TUNING_float32.md). Making the
// tiles takes as long as reading and writing the operands, so each row must attend to many keys.
// Modifiers make the sm_80 kernels up to twice as slow.
struct Float32Least {
  int64_t keys, attended;
};
constexpr Float32Least least_float32_keys(int32_t head_dim, bool is_backward, Float32Call call) {
  const bool narrow = head_dim <= 64, wide = head_dim > 128;
  switch (call) {
    case Float32Call::kKeyMask:
      return is_backward ? Float32Least{256, 256} : Float32Least{320, 320};
    case Float32Call::kModified:
      if (is_backward) return wide ? Float32Least{256, 256} : Float32Least{384, 384};
      return narrow ? Float32Least{256, 256} : Float32Least{320, 320};
    default:
      if (is_backward) {
        return narrow ? Float32Least{576, 576}
               : wide ? Float32Least{384, 320}
                      : Float32Least{400, 400};
      }
      return narrow ? Float32Least{640, 640}
             : wide ? Float32Least{768, 384}
                    : Float32Least{384, 384};
  }
}

// Returns the same for split operands.
constexpr Float32Least least_split_operand_keys(int32_t head_dim, bool is_backward,
                                                Float32Call call) {
  if (is_backward) return {256, 256};
  switch (call) {
    case Float32Call::kKeyMask: return {192, 192};
    case Float32Call::kModified: return {128, 128};
    default: return {256, head_dim <= 64 ? 256 : 128};
  }
}

// Returns whether the kernels of a pass take a call. `attended`: as attended_keys() returns.
inline bool takes_float32(const Shape& shape, bool is_backward, bool split, Float32Call call,
                          int64_t attended) {
  const int32_t widest = std::max(shape.head_dim, shape.value_dim);
  const int64_t rows = int64_t{shape.q_len} * (shape.heads / std::max(shape.kv_heads, 1));
  const Float32Least least =
      split ? least_split_operand_keys(float32_head_dim(shape), is_backward, call)
            : least_float32_keys(float32_head_dim(shape), is_backward, call);
  return widest > 32 && widest <= (split ? kMaxSplitHeadDim : 256) &&
         shape.num_batch_dims <= kTensorMapBatchDims && shape.q_len >= 128 &&
         shape.kv_len >= least.keys && std::min(rows, attended) >= least.attended;
}

// Returns whether takes_float32() may hold for a call of this shape.
inline bool may_take_float32(const Shape& shape, bool is_backward, bool split) {
  return takes_float32(shape, is_backward, split, Float32Call::kPlain, shape.kv_len) ||
         takes_float32(shape, is_backward, split, Float32Call::kKeyMask, shape.kv_len) ||
         takes_float32(shape, is_backward, split, Float32Call::kModified, shape.kv_len);
}

// A tile of split operands, or a part of one, has 64 rows. After it come the rows' magnitudes.
inline constexpr int kSplitRows = 64;

// Lays out the workspace of the forward pass, which has tiles of keys and of values.
struct Float32Tiles {
  float *key = nullptr, *value = nullptr;
  KeyBits* bits = nullptr;     // of the keys of each tile
  KeyBits* bad = nullptr;      // of the keys of each tile whose values include NaN or infinity
  int32_t* counter = nullptr;  // of units that blocks have taken; cleared with the tiles
  int32_t tiles = 0;           // for each batch entry and key/value head

  // Return the number of keys of a tile, and the number of floats from one tile to the next.
  static constexpr int32_t keys(int32_t head_dim, bool split) {
    return split ? kSplitRows : 8192 / head_dim;
  }
  static constexpr int32_t floats(int32_t head_dim, bool split) {
    return keys(head_dim, split) * head_dim + (split ? kSplitRows : 0);
  }

  // Sets the pointers from `base` on, and returns the size in bytes. `base` may be null.
  static int64_t plan(const Shape& shape, bool split, void* base, Float32Tiles& result) {
    const int32_t head_dim = float32_head_dim(shape);
    result.tiles = static_cast<int32_t>(ceil_div(shape.kv_len, keys(head_dim, split)));
    const int64_t count = shape.batch * shape.kv_heads * result.tiles;
    const int64_t all = count * floats(head_dim, split);
    result.key = static_cast<float*>(base);
    result.value = result.key + all;
    result.bits = reinterpret_cast<KeyBits*>(result.value + all);
    result.bad = result.bits + count;
    result.counter = reinterpret_cast<int32_t*>(result.bad + count);
    return 2 * all * 4 + 2 * count * static_cast<int64_t>(sizeof(KeyBits)) +
           static_cast<int64_t>(sizeof(int32_t));
  }
};

// Lays out the operands' tiles in the workspace of the backward pass, after BackwardWorkspace. If
// there are few blocks of keys, several thread blocks divide the queries of each, and leave parts
// of dK and dV in the workspace.
struct Float32Gradient {
  static constexpr int kTileRows = 64, kBlockKeys = kSplitKeys;

  // Returns how many thread blocks divide the columns of the operands.
  static constexpr int32_t column_blocks(int32_t head_dim, bool split) {
    return head_dim <= (split ? 64 : 128) ? 1 : 2;
  }

  // Split tiles are read in both orders. There, `key_transposed` has zeros in place of NaN and
  // infinity, and is not transposed; the other two are null.
  float *query = nullptr, *query_transposed = nullptr;
  float *dout = nullptr, *dout_transposed = nullptr;
  float *key = nullptr, *key_transposed = nullptr, *value = nullptr;
  KeyBits* bits = nullptr;                 // of the keys of each tile
  int32_t query_tiles = 0, key_tiles = 0;  // for each batch entry and head
  // [parts, batch, K, S, head dim of queries or values] each, if there are several parts
  float *dkey = nullptr, *dvalue = nullptr;
  int32_t parts = 1;

  // Sets the pointers from `base` on, and returns the size in bytes. `base` may be null.
  static int64_t plan(const Shape& shape, bool split, void* base, Float32Gradient& result) {
    result.query_tiles = static_cast<int32_t>(ceil_div(shape.q_len, kTileRows));
    result.key_tiles = static_cast<int32_t>(ceil_div(shape.kv_len, kTileRows));
    const int32_t head_dim = float32_head_dim(shape);
    const int64_t of_tile =
        int64_t{kTileRows} * head_dim + (split ? kSplitRows * column_blocks(head_dim, split) : 0);
    const int64_t queries = shape.batch * shape.heads * result.query_tiles * of_tile;
    const int64_t keys = shape.batch * shape.kv_heads * result.key_tiles * of_tile;
    int64_t floats = 0;
    const auto take = [&](int64_t count) {
      floats += count;
      return static_cast<float*>(base) + (floats - count);
    };
    result.query = take(queries);
    if (!split) result.query_transposed = take(queries);
    result.dout = take(queries);
    if (!split) result.dout_transposed = take(queries);
    result.key = take(keys);
    result.key_transposed = take(keys);
    result.value = take(keys);
    result.bits = reinterpret_cast<KeyBits*>(result.value + keys);
    const int64_t tiles = keys / of_tile, heads = shape.batch * shape.kv_heads;
    const int64_t blocks = std::max<int64_t>(
        ceil_div(shape.kv_len, kBlockKeys) * heads * column_blocks(head_dim, split), 1);
    const int64_t most = shape.heads / std::max(shape.kv_heads, 1) * int64_t{result.query_tiles};
    result.parts = static_cast<int32_t>(
        std::clamp<int64_t>(kSplitBlocks / blocks, 1, std::max<int64_t>(most, 1)));
    const int64_t rows = result.parts == 1 ? 0 : result.parts * heads * shape.kv_len;
    result.dkey = reinterpret_cast<float*>(result.bits + tiles);
    result.dvalue = result.dkey + rows * shape.head_dim;
    return (floats + rows * (shape.head_dim + shape.value_dim)) * 4 +
           tiles * static_cast<int64_t>(sizeof(KeyBits));
  }
};

}  // namespace jax_flash::sm90
