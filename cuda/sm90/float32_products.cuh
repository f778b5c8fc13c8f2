// Defines steps that Hopper's kernels for float32 share.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/float32_tiles.h"
#include "ptx/shared.cuh"
#include "ptx/split.cuh"
#include "ptx/tf32.cuh"
#include "ptx/warpgroup.cuh"
#include "status.h"
#include "tile/element.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"
#include "tile/wgmma_tile.cuh"
#include "wgmma.h"

namespace jax_flash::sm90 {

// Calls launch(modifiers), where the modifiers are those of the kernel that takes the call, as a
// constant.
template <bool kGeneral, typename Launch>
Status with_float32_modifiers(const Forward& params, Launch launch) {
  if constexpr (!kGeneral) {
    return launch(std::integral_constant<uint32_t, kNoModifier>{});
  } else {
    if (float32_modifiers(params) == kFloat32Modifiers) {
      return launch(std::integral_constant<uint32_t, kFloat32Modifiers>{});
    }
    return launch(std::integral_constant<uint32_t, kFloat32Elements>{});
  }
}

// Operands are rounded to TF32 or, if kSplit, split into two numbers of float16 (ptx/split.cuh):
// three products then stand for one. kInner is the inner dimension of an instruction.
template <bool kSplit>
inline constexpr int kNumbers = kSplit ? ptx::kSplitNumbers : 1;
template <bool kSplit>
inline constexpr int kInner = kSplit ? 16 : 8;

// Calls product(a, b, adds) for all instructions of a sum over kSteps steps, with the step's index
// in each operand. The rests of operands follow the greater parts. The smaller products come first,
// since sums in the tensor cores are truncated. `adds` is 0 for the first one.
template <int kSteps, bool kSplit, typename Product>
__device__ __forceinline__ void for_products(Product product) {
  constexpr int kPairs[3][2] = {{1, 0}, {0, 1}, {0, 0}};
#pragma unroll
  for (int pair = kSplit ? 0 : 2; pair < 3; ++pair) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      product(kPairs[pair][0] * kSteps + k, kPairs[pair][1] * kSteps + k,
              k != 0 || (kSplit && pair != 0));
    }
  }
}

// Starts the product of 64 rows and the rows of another tile, d = a b^T.
template <int kHeadDim, bool kSplit, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void start_product(float (&d)[kN][4], const TileA& a, const TileB& b) {
  ptx::wgmma_fence();
  for_products<kHeadDim / kInner<kSplit>, kSplit>([&](int of_a, int of_b, int adds) {
    const uint64_t rows = descriptor_k_major(a, 0, of_a), cols = descriptor_k_major(b, 0, of_b);
    if constexpr (kSplit) {
      ptx::Wgmma<__half, 8 * kN>::template ss<0, 0>(d, rows, cols, adds);
    } else {
      ptx::Wgmma<Tf32, 8 * kN>::ss(d, rows, cols, adds);
    }
  });
  ptx::wgmma_commit_group();
}
// Starts an instruction whose first operand is in registers. kRowsInner: rows of the tile are the
// inner dimension.
template <bool kSplit, bool kRowsInner, int kN>
__device__ __forceinline__ void start_instruction(float (&d)[kN][4], const uint32_t (&a)[4],
                                                  uint64_t b, int adds) {
  if constexpr (kSplit) {
    ptx::Wgmma<__half, 8 * kN>::template rs<kRowsInner>(d, a, b, adds);
  } else {
    ptx::Wgmma<Tf32, 8 * kN>::rs(d, a, b, adds);
  }
}
// Does the same as start_product() for rows in registers.
template <bool kSplit, int kN, int kSteps, typename TileB>
__device__ __forceinline__ void start_product_from_registers(float (&d)[kN][4],
                                                             const uint32_t (&a)[kSteps][4],
                                                             const TileB& b) {
  ptx::wgmma_fence();
  for_products<kSteps / kNumbers<kSplit>, kSplit>([&](int of_a, int of_b, int adds) {
    start_instruction<kSplit, false>(d, a[of_a], descriptor_k_major(b, 0, of_b), adds);
  });
  ptx::wgmma_commit_group();
}

// Adds products d += a b, where a is in registers. The tile holds b if operands are split, and
// otherwise b transposed. Tensor cores truncate sums, so split products leave them after each step.
template <int kN, bool kSplit>
struct ProductSum {
  float sum[1][kN][4];
  float product[kSplit ? kN : 1][4];

  template <int kNumberSteps, typename TileB>
  __device__ __forceinline__ void start(const uint32_t (&a)[kNumberSteps][4], const TileB& b) {
    constexpr int kSteps = kNumberSteps / kNumbers<kSplit>;
    ptx::wgmma_fence();
    for_products<kSteps, kSplit>([&](int of_a, int of_b, int adds) {
      if constexpr (kSplit) {
        const int first_col = of_b / kSteps * (8 * kN);
        start_instruction<true, true>(product, a[of_a],
                                      descriptor_mn_major(b, first_col, of_b % kSteps), adds);
      } else {
        start_instruction<false, false>(sum[0], a[of_a], descriptor_k_major(b, 0, of_b), 1);
      }
    });
    ptx::wgmma_commit_group();
  }
  // Takes a product that has arrived. A split one is multiplied by the factors of this thread's
  // rows.
  __device__ __forceinline__ void finish([[maybe_unused]] float first = 1.0f,
                                         [[maybe_unused]] float second = 1.0f) {
    if constexpr (kSplit) {
      ptx::wgmma_results(product);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[0][n][e] = fmaf(product[n][e], e < 2 ? first : second, sum[0][n][e]);
        }
      }
    } else {
      ptx::wgmma_results(sum[0]);
    }
  }
};

// Multiplies products of split operands by the factors of this thread's rows, and by the magnitudes
// of their columns, which `columns` points to in shared memory.
template <int kN>
__device__ __forceinline__ void multiply_all(float (&products)[kN][4], float2 rows,
                                             const float* columns) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 of = *reinterpret_cast<const float2*>(columns + fragment_col(n, 0));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      products[n][e] = products[n][e] * (e < 2 ? rows.x : rows.y) * (e % 2 == 0 ? of.x : of.y);
    }
  }
}

// The number of groups of four registers that hold operands of 8 kN columns.
template <int kN, bool kSplit>
inline constexpr int kOperandSteps = kNumbers<kSplit> * kN * 8 / kInner<kSplit>;

// Keeps the compiler from making operands after the first product has started, which would make the
// products wait for each other.
__device__ __forceinline__ void keep_operands(uint32_t (&of)[4]) {
  asm volatile("" : "+r"(of[0]), "+r"(of[1]), "+r"(of[2]), "+r"(of[3])::"memory");
}

// Rounds accumulators, as operands of the next product: the columns 2 t and 2 t + 1 serve as
// operand columns t and t + 4 (sm90/float32_tiles.cuh).
template <int kN>
__device__ __forceinline__ void round_operands(const float (&from)[kN][4], uint32_t (&to)[kN][4]) {
  constexpr int kElement[4] = {0, 2, 1, 3};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[n][i] = ptx::round_to_tf32(__float_as_uint(from[n][kElement[i]]));
    }
    keep_operands(to[n]);
  }
}
// Returns the power of two for a row's numbers, given this thread's greatest one. The four threads
// of a row call it.
__device__ __forceinline__ float factor_of_row(float greatest) {
  greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
  greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
  return ptx::split_factor(greatest);
}

// Splits accumulators, as operands of the next product with the rows that `columns` has the
// magnitudes of, in shared memory. Returns the factors of that product's rows.
template <int kN>
__device__ __forceinline__ float2 split_operands(const float (&from)[kN][4],
                                                 uint32_t (&to)[kOperandSteps<kN, true>][4],
                                                 const float* columns) {
  constexpr int kSteps = kN / 2;
  float x[kN][4], greatest[2] = {};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 of = *reinterpret_cast<const float2*>(columns + fragment_col(n, 0));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] = from[n][e] * (e % 2 == 0 ? of.x : of.y);
      greatest[e / 2] = fmaxf(greatest[e / 2], fabsf(x[n][e]));
    }
  }
  const float factors[2] = {factor_of_row(greatest[0]), factor_of_row(greatest[1])};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &x[2 * k + i / 2][i % 2 * 2];
      uint32_t words[ptx::kSplitNumbers];
      ptx::split(pair[0] * factors[i % 2], pair[1] * factors[i % 2], words);
      to[k][i] = words[0];
      to[kSteps + k][i] = words[1];
    }
    keep_operands(to[k]);
    keep_operands(to[kSteps + k]);
  }
  return make_float2(ptx::split_magnitude(factors[0]) * ptx::kSplitProduct,
                     ptx::split_magnitude(factors[1]) * ptx::kSplitProduct);
}

// Calls body(half, k, x) for each four columns of a warp's 16 rows that this thread reads, those
// from 16 k + 4 t on. `from` points to the first row. `rows` and `cols` exist, others are zeros.
template <int kCols, typename Body>
__device__ __forceinline__ void read_fours(const float* from, int64_t stride, int32_t rows,
                                           int32_t cols, bool vectors, Body body) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(0, 2 * half);
    const float* of_row = from + row * stride;
#pragma unroll
    for (int k = 0; k < kCols / 16; ++k) {
      const int32_t col = k * 16 + threadIdx.x % 4 * 4;
      float x[4] = {};
      if (vectors) {
        if (row < rows && col < cols) {
          const float4 four = __ldg(reinterpret_cast<const float4*>(of_row + col));
          x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (row < rows && col + e < cols) x[e] = __ldg(of_row + col + e);
        }
      }
      body(half, k, x);
    }
  }
}

// Reads this thread's operands of a warp's 16 rows, in the order of tiles of rows, rounded.
template <int kSteps>
__device__ __forceinline__ void read_operands(uint32_t (&to)[kSteps][4], const float* from,
                                              int64_t stride, int32_t rows, int32_t cols,
                                              bool vectors) {
  read_fours<8 * kSteps>(
      from, stride, rows, cols, vectors, [&](int half, int k, const float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          to[2 * k + e / 2][e % 2 * 2 + half] = ptx::round_to_tf32(__float_as_uint(x[e]));
        }
      });
}
// Does the same for split operands, and returns the factors of products with this thread's rows.
template <int kNumberSteps>
__device__ __forceinline__ float2 read_split_operands(uint32_t (&to)[kNumberSteps][4],
                                                      const float* from, int64_t stride,
                                                      int32_t rows, int32_t cols, bool vectors) {
  constexpr int kSteps = kNumberSteps / ptx::kSplitNumbers;
  float read[2][kSteps][4], greatest[2] = {};
  read_fours<16 * kSteps>(from, stride, rows, cols, vectors,
                          [&](int half, int k, const float (&x)[4]) {
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                              read[half][k][e] = x[e];
                              if (is_finite(x[e])) {
                                greatest[half] = fmaxf(greatest[half], fabsf(x[e]));
                              }
                            }
                          });
  const float factors[2] = {factor_of_row(greatest[0]), factor_of_row(greatest[1])};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float (&x)[4] = read[half][k];
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // columns 4 t + e and 4 t + 2 + e are places 8 e + 2 t, + 1
        uint32_t words[ptx::kSplitNumbers];
        ptx::split(x[e] * factors[half], x[2 + e] * factors[half], words);
        to[k][2 * e + half] = words[0];
        to[kSteps + k][2 * e + half] = words[1];
      }
    }
  }
#pragma unroll
  for (auto& of : to) keep_operands(of);
  return make_float2(ptx::split_magnitude(factors[0]) * ptx::kSplitProduct,
                     ptx::split_magnitude(factors[1]) * ptx::kSplitProduct);
}

// Writes a thread's operands of a warp's 16 rows to a tile of rows, from `row` on.
template <int kSteps, typename Tile>
__device__ __forceinline__ void store_operands(const Tile& tile, int row,
                                               const uint32_t (&from)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * k + i / 2;
      ptx::st_shared_b32(
          tile.address(row + fragment_row(0, 2 * (i % 2)), chunk) + threadIdx.x % 4 * 4,
          from[k][i]);
    }
  }
}

// Stores a warp's 16 rows of a gradient times `scale`, of which `rows` exist.
template <int kN>
__device__ __forceinline__ void store_gradient(const Float32Rows& to, int32_t rows, float scale,
                                               const float (&gradient)[kN][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(0, 2 * half);
    if (row < rows) to.store(row, half, gradient, 0, scale);
  }
}

}  // namespace jax_flash::sm90
