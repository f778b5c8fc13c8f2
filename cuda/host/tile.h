// Finds the elements of a tile of logits that may be attended to: a word of 64 bits for each row,
// bit c for key position kv_begin + c. A bias of -inf clears bits like a mask. If it were only
// added, its sum with the product of a key that is NaN would be NaN.
#pragma once

#include "host/head.h"

namespace jax_flash::host::JAX_FLASH_ISA {

static_assert(kBlockKv == 64, "one word of bits is one row of a tile");

// Holds query rows [begin, begin + rows) of a head, and the limits by which tiles are skipped.
struct QueryBlock {
  int64_t begin;
  int rows;
  // `keys` are the keys that some row may attend to, and `shared_keys` those that every row may
  // attend to, as far as causal order, window and lengths allow.
  Span keys;
  Span shared_keys;
  int32_t min_segment, max_segment;  // of the rows
};

struct Tile {
  int64_t q_begin, kv_begin;
  // Only rows [row_begin, row_end) and columns [0, cols) have elements that may be attended to.
  int row_begin, row_end, cols;
  uint64_t any;            // columns that some row may attend to
  uint64_t bits[kBlockQ];  // by row of the block

  int rows() const { return row_end - row_begin; }
  int vectors() const { return (cols + kLanes - 1) / kLanes; }
  // Returns whether row r may attend to every column that its vectors contain.
  bool whole(int r) const {
    const int width = vectors() * kLanes;
    const uint64_t all = width == 64 ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    return (bits[r] & all) == all;
  }
};

inline QueryBlock query_block(const Head& head, int64_t begin) {
  const int64_t end = min_of(begin + kBlockQ, head.q_len);
  QueryBlock block = {begin, static_cast<int>(end - begin), {0, 0}, {0, 0}, 0, 0};
  if (end <= begin) {
    block.rows = 0;
    return block;
  }
  block.keys = head.any_of(begin, end);
  block.shared_keys = head.all_of(begin, end);
  if (head.query_segments.data) {
    block.min_segment = block.max_segment = head.query_segments[begin];
    for (int64_t i = begin + 1; i < end; ++i) {
      block.min_segment = min_of(block.min_segment, head.query_segments[i]);
      block.max_segment = max_of(block.max_segment, head.query_segments[i]);
    }
  }
  return block;
}

// Returns a word in which bits [span.begin, span.end) - kv_begin are set.
JAX_FLASH_INLINE uint64_t span_bits(Span span, int64_t kv_begin) {
  const auto below = [&](int64_t end) {
    const int64_t count = min_of<int64_t>(max_of<int64_t>(end - kv_begin, 0), 64);
    return count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  };
  return below(span.end) & ~below(span.begin);
}

// Returns a word in which bit c is set if byte c is not zero.
JAX_FLASH_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t word;
    __builtin_memcpy(&word, bytes + 8 * i, sizeof word);
    const uint64_t ones = (((word & kLow) + kLow) | word) >> 7 & 0x0101010101010101;
    // The product moves byte b of `ones` to bit 56 + b, without carries.
    bits |= (ones * 0x0102040810204080) >> 56 << (8 * i);
  }
  return bits;
}

// Returns the bits of row i of the mask.
inline uint64_t mask_bits(const Plane& mask, int64_t i, int64_t kv_begin, int cols) {
  const auto* data = reinterpret_cast<const uint8_t*>(mask.at(i, kv_begin, 1));
  if (mask.col == 0) return *data ? ~uint64_t{0} : 0;
  if (mask.col == 1 && cols == 64) return nonzero_bytes(data);
  uint8_t bytes[64] = {};
  for (int c = 0; c < cols; ++c) bytes[c] = data[c * mask.col];
  return nonzero_bytes(bytes);
}

// Loads the tile's bias into s, and returns whether any element is -inf. Each row of a bias is
// often in another page of memory, so rows are prefetched. Prefetches beyond the bias are harmless.
inline bool load_bias(Plane bias, const Tile& tile, Matrix s) {
  constexpr int kRowsAhead = 12;
  const int begin = tile.row_begin, end = tile.row_end, cols = tile.cols;
  return with_type(bias.dtype, [&]<typename T>(T*) {
    const T* row =
        reinterpret_cast<const T*>(bias.at(tile.q_begin + begin, tile.kv_begin, sizeof(T)));
    float* to = s.data + begin * s.row;
    VecI found = {};
    for (int r = begin; r < end; ++r) {
      for (int c = 0; c < cols; c += kLanes) {
        __builtin_prefetch(row + c * bias.col + kRowsAhead * bias.row);
        const Vec x = load_first_strided(row + c * bias.col, bias.col, cols - c);
        found |= x == -kInfinity;
        store(to + c, x);
      }
      row += bias.row;
      to += s.row;
    }
    return reduce_add(__builtin_convertvector(found, Vec)) != 0.0f;
  });
}

// Clears the bits of elements for which the bias in s is -inf.
inline void apply_bias(Matrix s, Tile& tile) {
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    uint8_t bytes[64] = {};
    for (int c = 0; c < tile.cols; ++c) bytes[c] = s.data[r * s.row + c] != -kInfinity;
    tile.bits[r] &= nonzero_bytes(bytes);
  }
}

// Element (r, c) of a tile is on diagonal first_diagonal(r) + c. A tile has kDiagonals - 1
// diagonals.
inline constexpr int kDiagonals = kBlockQ + kBlockKv;
inline int first_diagonal(int r) { return kBlockQ - 1 - r; }

// Clears the bits of elements for which the relative bias is -inf.
inline void apply_distances(const ByDistance& distance, Tile& tile) {
  const int64_t first = tile.kv_begin - tile.q_begin - first_diagonal(0);
  uint8_t bytes[kDiagonals];
  for (int t = 0; t < kDiagonals; ++t) {
    bytes[t] = distance.table[distance.index(distance.of(first + t))] != -kInfinity;
  }
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    tile.bits[r] &= nonzero_bytes(bytes + first_diagonal(r));
  }
}

// Clears the bits of elements whose query and key have different segments.
inline void apply_segments(const Head& head, const QueryBlock& block, int cols, Tile& tile) {
  int32_t ids[64];
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int c = 0; c < cols; ++c) {
    ids[c] = head.kv_segments[tile.kv_begin + c];
    low = min_of(low, ids[c]);
    high = max_of(high, ids[c]);
  }
  if (low > block.max_segment || high < block.min_segment) {
    for (uint64_t& bits : tile.bits) bits = 0;
    return;
  }
  const bool uniform = low == high && block.min_segment == block.max_segment;
  if (uniform) return;  // the only segments of the rows and of the keys are equal
  int32_t known_id = 0;
  uint64_t equal = 0;
  for (int r = 0; r < block.rows; ++r) {
    const int32_t id = head.query_segments[block.begin + r];
    if (r == 0 || id != known_id) {  // most rows are in the segment of the previous row
      uint8_t bytes[64] = {};
      for (int c = 0; c < cols; ++c) bytes[c] = ids[c] == id;
      equal = nonzero_bytes(bytes);
      known_id = id;
    }
    tile.bits[r] &= equal;
  }
}

// Sets tile.any, row_begin, row_end and cols. Returns false if no element may be attended to.
inline bool find_extent(const QueryBlock& block, Tile& tile) {
  tile.any = 0;
  tile.row_begin = block.rows;
  tile.row_end = 0;
  for (int r = 0; r < block.rows; ++r) {
    if (tile.bits[r] == 0) continue;
    tile.any |= tile.bits[r];
    tile.row_begin = min_of(tile.row_begin, r);
    tile.row_end = r + 1;
  }
  if (tile.any == 0) return false;
  tile.cols = 64 - __builtin_clzll(tile.any);
  return true;
}

// Computes the tile of `block` and keys [kv_begin, kv_begin + 64), and loads its bias into s.
// Returns false if no element may be attended to. This takes a few hundred cycles, besides the
// loads of a bias. The products of a tile take 20,000.
inline bool make_tile(const Head& head, const QueryBlock& block, int64_t kv_begin, Matrix s,
                      Tile& tile) {
  if (block.rows == 0 || block.keys.end <= kv_begin || block.keys.begin >= kv_begin + kBlockKv) {
    return false;
  }
  const int cols = static_cast<int>(min_of<int64_t>(head.kv_len - kv_begin, kBlockKv));
  tile.q_begin = block.begin;
  tile.kv_begin = kv_begin;
  if (span_bits(block.shared_keys, kv_begin) == ~uint64_t{0}) {
    for (int r = 0; r < block.rows; ++r) tile.bits[r] = ~uint64_t{0};
  } else {
    for (int r = 0; r < block.rows; ++r) {
      tile.bits[r] = span_bits(head.span(block.begin + r), kv_begin);
    }
  }
  if (head.query_segments.data) apply_segments(head, block, cols, tile);
  if (head.mask.data) {
    uint64_t bits = 0;
    for (int r = 0; r < block.rows; ++r) {
      if (tile.bits[r] == 0) continue;
      if (head.mask.row != 0 || bits == 0) {
        bits = mask_bits(head.mask, block.begin + r, kv_begin, cols);
      }
      tile.bits[r] &= bits;
    }
  }
  if (!find_extent(block, tile)) return false;
  bool fewer = head.distance.forbids;
  if (fewer) apply_distances(head.distance, tile);
  if (head.bias.data && load_bias(head.bias, tile, s)) {
    apply_bias(s, tile);
    fewer = true;
  }
  return !fewer || find_extent(block, tile);
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
