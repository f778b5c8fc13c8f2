// Computes with chunks of 16 bytes of operands in global memory.
#pragma once

#include <cstdint>

#include "tile/smem_tile.cuh"

namespace jax_flash {

// Returns the product of kChunk elements with as many others.
template <typename Element>
__device__ __forceinline__ float dot_product_of_chunk(const uint4& a, const uint4& b) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    sum = fmaf(static_cast<float>(reinterpret_cast<const Element*>(&a)[e]),
               static_cast<float>(reinterpret_cast<const Element*>(&b)[e]), sum);
  }
  return sum;
}
// Does the same for elements in global memory, contiguous and aligned.
template <typename Element>
__device__ __forceinline__ float dot_product_of_chunk(const Element* a, const Element* b) {
  return dot_product_of_chunk<Element>(*reinterpret_cast<const uint4*>(a),
                                       *reinterpret_cast<const uint4*>(b));
}

}  // namespace jax_flash
