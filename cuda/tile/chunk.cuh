// Computes with chunks of 16 bytes of operands in global memory.
#pragma once

#include <cstdint>

#include "tile/smem_tile.cuh"

namespace jax_flash {

// Returns the product of kChunk contiguous elements, aligned, with as many others.
template <typename Element>
__device__ __forceinline__ float dot_product_of_chunk(const Element* a, const Element* b) {
  const uint4 a_words = *reinterpret_cast<const uint4*>(a);
  const uint4 b_words = *reinterpret_cast<const uint4*>(b);
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    sum = fmaf(static_cast<float>(reinterpret_cast<const Element*>(&a_words)[e]),
               static_cast<float>(reinterpret_cast<const Element*>(&b_words)[e]), sum);
  }
  return sum;
}

}  // namespace jax_flash
