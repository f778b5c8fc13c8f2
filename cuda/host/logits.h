// From scale <q, k> to logits: bias, soft cap, mask.
#pragma once

#include "host/gemm.h"
#include "host/math.h"
#include "host/tile.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Asks for what finish_logits_row will read of the bias and the mask at row i.
inline void prefetch_logits_row(const Head& head, int64_t i, int64_t kv_begin) {
  const auto prefetch = [&](const Plane& plane, int64_t element_size) {
    if (plane.data == nullptr || plane.row == 0 || plane.col == 0) return;
    prefetch_bytes(plane.at(i, kv_begin, element_size), kBlockKv * element_size);
  };
  prefetch(head.bias, size_of(head.bias.dtype));
  prefetch(head.mask, 1);
}

// Turns row r of a tile of products into logits, -inf where r may not attend.
inline void finish_logits_row(const Head& head, const Tile& tile, int r, float* s) {
  const int vectors = tile.vectors();
  if (head.bias.data) {
    const Plane& bias = head.bias;
    float row[kBlockKv];
    load_strided(bias.at(tile.q_begin + r, tile.kv_begin, size_of(bias.dtype)), bias.dtype,
                 bias.col, tile.cols, row);
    for (int v = 0; v < vectors; ++v) {
      store(s + v * kLanes, load(s + v * kLanes) + load(row + v * kLanes));
    }
  }
  if (const float cap = head.options->logits_soft_cap; cap != 0.0f) {
    for (int v = 0; v < vectors; ++v) {
      store(s + v * kLanes, tanh(load(s + v * kLanes) / cap) * cap);
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
