// Computes the logits of a tile: products, biases, soft cap and mask.
#pragma once

#include "host/distance.h"
#include "host/gemm.h"
#include "host/math.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// s = q key_t + biases, for the tile's rows. If the call has a bias, s holds it before.
inline void start_logits(const Head& head, const Tile& tile, Matrix q, Matrix key_t, Matrix s) {
  if (head.distance.present) add_by_distance(head, tile, head.bias.data != nullptr, s);
  gemm({tile.rows(), tile.cols, head.key.dim, head.adds_to_logits()},
       as_left(from_row(q, tile.row_begin)), key_t, from_row(s, tile.row_begin));
}

// Turns row r of s into logits: applies the soft cap, and sets elements to -inf that r may not
// attend to. A sum that has overflowed to -inf must not become -cap.
inline void finish_logits_row(const Head& head, const Tile& tile, int r, float* s) {
  const int vectors = tile.vectors();
  if (const float cap = head.options->logits_soft_cap; cap != 0.0f) {
    const bool adds = head.adds_to_logits();
    for (int v = 0; v < vectors; ++v) {
      const Vec x = load(s + v * kLanes), capped = tanh(x / cap) * cap;
      store(s + v * kLanes, adds ? (x == -kInfinity ? x : capped) : capped);
    }
  }
  if (!tile.whole(r)) {
    for (int v = 0; v < vectors; ++v) {
      const VecI allowed = lanes_set(tile.bits[r], v);
      store(s + v * kLanes, allowed ? load(s + v * kLanes) : splat(-kInfinity));
    }
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
