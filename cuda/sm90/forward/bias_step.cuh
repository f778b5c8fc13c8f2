// Processes a tile of keys in the sm_90 forward kernel with a bias.
#pragma once

#include <cstdint>

#include "sm90/forward/consumer.cuh"

namespace jax_flash::sm90 {

// Implements ForwardConsumer's next_tile(). Each case has its own code: that of most tiles is one
// basic block, in which the assembler interleaves the exponentials with what precedes and follows
// them. The scores are started before the case is determined, since they would have to wait for it.
template <typename Config, typename Consumer>
__device__ __forceinline__ void next_biased_tile(Consumer& consumer, int32_t last, int32_t tile) {
  consumer.wait_key();
  consumer.start_scores();
  if constexpr (Consumer::kOptimistic) {
    if (!consumer.is_careful(tile) && !consumer.at_edge(tile) && consumer.modified.reads_ahead()) {
      consumer.template next_tile<TileKind::kBiasBeside>(last, tile);
      return;
    }
  }
  consumer.next_tile(last, tile);
}

}  // namespace jax_flash::sm90
