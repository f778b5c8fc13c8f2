// Decides which float32 calls take Hopper's kernels of TF32 products (sm90/forward_float32,
// sm90/backward_float32), and lays out tiles of their operands (sm90/float32_tiles.cuh). Also
// defines KeyBits, which kernels of 16-bit calls share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/tensor_map.h"

namespace jax_flash::sm90 {

// Holds the bits of a tile's keys. Bit 2 n + e of word w is key 8 n + 2 w + e: a thread's columns
// are those of word threadIdx.x % 4.
struct KeyBits {
  uint32_t words[4];
};

// Returns the head dim of the instance that takes a call.
inline int32_t float32_head_dim(const Shape& shape) {
  return std::max(shape.head_dim, shape.value_dim) <= 64 ? 64 : 128;
}

// Returns whether the kernels of a pass are faster than those of the sm_80 family, as measured on
// an H200 (sm90/TUNING_float32.md). To make the tiles takes as long as to read and write the
// operands, so each key must serve many rows, and each row many keys. With a mask, the sm_80
// kernels take twice as long.
inline bool takes_float32(const Shape& shape, bool is_backward, bool has_mask) {
  const int32_t widest = std::max(shape.head_dim, shape.value_dim);
  const int64_t rows = int64_t{shape.q_len} * (shape.heads / std::max(shape.kv_heads, 1));
  const int64_t least = has_mask ? (is_backward ? 256 : 320)
                                 : (is_backward ? 640 : 1024) * 64 / float32_head_dim(shape);
  return widest > 32 && widest <= 128 && shape.num_batch_dims <= kTensorMapBatchDims &&
         shape.q_len >= 128 && std::min<int64_t>(rows, shape.kv_len) >= least;
}

// Lays out the workspace of the forward pass. A tile, of keys or of transposed values, has
// kTileFloats numbers.
struct Float32Tiles {
  static constexpr int kTileFloats = 8192;

  float *key = nullptr, *value = nullptr;
  KeyBits* bits = nullptr;     // of the keys of each tile
  int32_t* counter = nullptr;  // of units that blocks have taken; cleared with the tiles
  int32_t tiles = 0;           // for each batch entry and key/value head

  // Returns the keys of a tile.
  static constexpr int32_t keys(int32_t head_dim) { return kTileFloats / head_dim; }

  // Sets the pointers from `base` on, and returns the size in bytes. `base` may be null.
  static int64_t plan(const Shape& shape, void* base, Float32Tiles& result) {
    result.tiles = static_cast<int32_t>(ceil_div(shape.kv_len, keys(float32_head_dim(shape))));
    const int64_t count = shape.batch * shape.kv_heads * result.tiles;
    result.key = static_cast<float*>(base);
    result.value = result.key + count * kTileFloats;
    result.bits = reinterpret_cast<KeyBits*>(result.value + count * kTileFloats);
    result.counter = reinterpret_cast<int32_t*>(result.bits + count);
    return count * (2 * kTileFloats * 4 + static_cast<int64_t>(sizeof(KeyBits))) +
           static_cast<int64_t>(sizeof(int32_t));
  }
};

// Lays out the operands' tiles in the workspace of the backward pass, after BackwardWorkspace.
struct Float32Gradient {
  static constexpr int kTileRows = 64;

  float *query = nullptr, *query_transposed = nullptr;
  float *dout = nullptr, *dout_transposed = nullptr;
  float *key = nullptr, *key_transposed = nullptr, *value = nullptr;
  KeyBits* bits = nullptr;                 // of the keys of each tile
  int32_t query_tiles = 0, key_tiles = 0;  // for each batch entry and head

  // Sets the pointers from `base` on, and returns the size in bytes. `base` may be null.
  static int64_t plan(const Shape& shape, void* base, Float32Gradient& result) {
    result.query_tiles = static_cast<int32_t>(ceil_div(shape.q_len, kTileRows));
    result.key_tiles = static_cast<int32_t>(ceil_div(shape.kv_len, kTileRows));
    const int64_t of_tile = int64_t{kTileRows} * float32_head_dim(shape);
    const int64_t queries = shape.batch * shape.heads * result.query_tiles * of_tile;
    const int64_t keys = shape.batch * shape.kv_heads * result.key_tiles * of_tile;
    result.query = static_cast<float*>(base);
    result.query_transposed = result.query + queries;
    result.dout = result.query_transposed + queries;
    result.dout_transposed = result.dout + queries;
    result.key = result.dout_transposed + queries;
    result.key_transposed = result.key + keys;
    result.value = result.key_transposed + keys;
    result.bits = reinterpret_cast<KeyBits*>(result.value + keys);
    return (4 * queries + 3 * keys) * 4 + keys / of_tile * static_cast<int64_t>(sizeof(KeyBits));
  }
};

}  // namespace jax_flash::sm90
