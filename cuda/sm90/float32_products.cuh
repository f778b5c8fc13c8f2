// Defines steps that Hopper's kernels for float32 share.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/float32_tiles.h"
#include "ptx/shared.cuh"
#include "ptx/split.cuh"
#include "ptx/warpgroup.cuh"
#include "status.h"
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

// Below, kNumbers numbers of float16 stand for one of an operand (ptx/split.cuh). With two of each
// operand, three products stand for one.

// Calls product(a, b, adds) for all instructions of a sum over kSteps steps, with the step's index
// in each operand. The rests of operands follow the greater parts. The smaller products come first,
// since sums in the tensor cores are truncated. `adds` is 0 for the first one.
template <int kSteps, int kNumbers, typename Product>
__device__ __forceinline__ void for_products(Product product) {
  constexpr int kPairs[3][2] = {{1, 0}, {0, 1}, {0, 0}};
  constexpr int kFirst = kNumbers == 2 ? 0 : 2;
#pragma unroll
  for (int pair = kFirst; pair < 3; ++pair) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      product(kPairs[pair][0] * kSteps + k, kPairs[pair][1] * kSteps + k, k != 0 || pair != kFirst);
    }
  }
}

// The number of groups of four registers that hold operands of 8 kN columns.
template <int kN, int kNumbers>
inline constexpr int kOperandSteps = kNumbers * kN / 2;

// Starts the product of 64 rows and the rows of another tile, d = a b^T.
template <int kHeadDim, int kNumbers, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void start_product(float (&d)[kN][4], const TileA& a, const TileB& b) {
  ptx::wgmma_fence();
  for_products<kHeadDim / 16, kNumbers>([&](int of_a, int of_b, int adds) {
    ptx::Wgmma<__half, 8 * kN>::template ss<0, 0>(d, descriptor_k_major(a, 0, of_a),
                                                  descriptor_k_major(b, 0, of_b), adds);
  });
  ptx::wgmma_commit_group();
}
// Does the same for rows in registers.
template <int kNumbers, int kN, int kSteps, typename TileB>
__device__ __forceinline__ void start_product_from_registers(float (&d)[kN][4],
                                                             const uint32_t (&a)[kSteps][4],
                                                             const TileB& b) {
  ptx::wgmma_fence();
  for_products<kSteps / kNumbers, kNumbers>([&](int of_a, int of_b, int adds) {
    ptx::Wgmma<__half, 8 * kN>::template rs<0>(d, a[of_a], descriptor_k_major(b, 0, of_b), adds);
  });
  ptx::wgmma_commit_group();
}

// Multiplies products by the magnitudes of their columns, which `columns` points to in shared
// memory.
template <int kN>
__device__ __forceinline__ void multiply_columns(float (&products)[kN][4], const float* columns) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 of = *reinterpret_cast<const float2*>(columns + fragment_col(n, 0));
#pragma unroll
    for (int e = 0; e < 4; ++e) products[n][e] *= e % 2 == 0 ? of.x : of.y;
  }
}
// Multiplies products by the factors of this thread's rows, and by the magnitudes
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

// Keeps the compiler from making operands after the first product has started, which would make the
// products wait for each other.
__device__ __forceinline__ void keep_operands(uint32_t (&of)[4]) {
  asm volatile("" : "+r"(of[0]), "+r"(of[1]), "+r"(of[2]), "+r"(of[3])::"memory");
}

// Writes accumulators times a power of two for each row as operands of the next product.
template <int kNumbers, int kN>
__device__ __forceinline__ void write_operands(const float (&x)[kN][4], const float (&powers)[2],
                                               uint32_t (&to)[kOperandSteps<kN, kNumbers>][4]) {
  constexpr int kSteps = kN / 2;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &x[2 * k + i / 2][i % 2 * 2];
      uint32_t words[kNumbers];
      ptx::split(pair[0] * powers[i % 2], pair[1] * powers[i % 2], words);
#pragma unroll
      for (int number = 0; number < kNumbers; ++number) {
        to[number * kSteps + k][i] = words[number];
      }
    }
#pragma unroll
    for (int number = 0; number < kNumbers; ++number) keep_operands(to[number * kSteps + k]);
  }
}

// Returns the greatest of a row's numbers, given this thread's. The four threads of a row call it.
__device__ __forceinline__ float greatest_of_row(float own) {
  own = fmaxf(own, __shfl_xor_sync(0xffffffff, own, 1));
  return fmaxf(own, __shfl_xor_sync(0xffffffff, own, 2));
}

// Adds products sum += a b of operands a in registers and tiles b. Each row of a has a power of
// two.
//
// Two numbers: a step has its own powers, and its product leaves the tensor cores, since sums there
// are truncated. One number: products are added in the tensor cores, so the powers must stay. They
// fall when an operand would become too great, and the sum with them.
template <int kN, int kNumbers>
struct ProductSum {
  static constexpr bool kAddsInPlace = kNumbers == 1;
  static constexpr float kMost = 0x1p15f;       // of an operand times its power
  static constexpr float kHeadroom = 0x1p-12f;  // so that powers seldom fall
  static constexpr float kGreatestPower = 0x1p120f, kLeastPower = 0x1p-113f;

  float sum[1][kN][4];
  float product[kAddsInPlace ? 1 : kN][4];
  float powers[2];

  __device__ __forceinline__ void clear() {
    set_zero(sum);
    powers[0] = powers[1] = kGreatestPower;
  }

  // Makes operands of `x`, of a product with rows whose magnitudes `columns` points to in shared
  // memory. No product may be running that adds in place. `bound`: 0, or at least the greatest
  // element. While it shows that the powers can stay, that element is not looked for.
  template <int kTerms>
  __device__ __forceinline__ void prepare(float (&x)[kTerms][4],
                                          uint32_t (&to)[kOperandSteps<kTerms, kNumbers>][4],
                                          const float* columns, float bound = 0.0f) {
    multiply_columns(x, columns);
    if (!kAddsInPlace || bound == 0.0f ||
        exceed(greatest_magnitude<kTerms>(columns) * bound * fmaxf(powers[0], powers[1]))) {
      set_powers(x);
    }
    write_operands<kNumbers>(x, powers, to);
  }

  template <int kSteps, typename TileB>
  __device__ __forceinline__ void start(const uint32_t (&a)[kSteps][4], const TileB& b) {
    ptx::wgmma_fence();
    for_products<kSteps / kNumbers, kNumbers>([&](int of_a, int of_b, int adds) {
      if constexpr (kAddsInPlace) {
        ptx::Wgmma<__half, 8 * kN>::template rs<1>(sum[0], a[of_a], descriptor_mn_major(b, 0, of_b),
                                                   1);
      } else {
        const int of_number = kSteps / kNumbers, first_col = of_b / of_number * (8 * kN);
        ptx::Wgmma<__half, 8 * kN>::template rs<1>(
            product, a[of_a], descriptor_mn_major(b, first_col, of_b % of_number), adds);
      }
    });
    ptx::wgmma_commit_group();
  }

  // Takes a product that has arrived.
  __device__ __forceinline__ void finish() {
    if constexpr (kAddsInPlace) {
      ptx::wgmma_results(sum[0]);
    } else {
      ptx::wgmma_results(product);
      const float2 of = factors();
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[0][n][e] = fmaf(product[n][e], e < 2 ? of.x : of.y, sum[0][n][e]);
        }
      }
    }
  }

  // Multiplies the sum by `factor`, at most 1, where later operands are relative to a greater one.
  // The powers rise instead, as far as powers of two can: those operands would have few bits.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    float multiples[2] = {factor[0], factor[1]};
    if constexpr (kAddsInPlace) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float power = power_below(fminf(powers[half] / factor[half], kGreatestPower));
        // The quotient may be infinite if the factor is 0.
        multiples[half] = factor[half] == 0.0f ? 0.0f : factor[half] * (power / powers[half]);
        powers[half] = power;
      }
    }
    multiply(multiples);
  }

  // Turns the sum into that of the operands themselves.
  __device__ __forceinline__ void settle() {
    if constexpr (kAddsInPlace) {
      const float2 of = factors();
      multiply({of.x, of.y});
    }
  }

 private:
  // Returns the greatest power of two that is not above `x`.
  static __device__ __forceinline__ float power_below(float x) {
    return __uint_as_float(__float_as_uint(x) & 0x7f800000);
  }
  __device__ __forceinline__ float2 factors() const {
    return make_float2(ptx::split_magnitude(powers[0]) * ptx::kSplitProduct,
                       ptx::split_magnitude(powers[1]) * ptx::kSplitProduct);
  }
  __device__ __forceinline__ void multiply(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[0][n][e] *= factor[e / 2];
    }
  }
  // Returns whether some operand of the warp would be too great, given this thread's greatest one.
  static __device__ __forceinline__ bool exceed(float greatest) {
    return __any_sync(0xffffffff, greatest > kMost);
  }
  // Returns the greatest magnitude of a tile's rows. All are positive.
  template <int kTerms>
  static __device__ __forceinline__ float greatest_magnitude(const float* columns) {
    float own = 0.0f;
#pragma unroll
    for (int row = 0; row < 8 * kTerms; row += 32)
      own = fmaxf(own, columns[row + threadIdx.x % 32]);
    return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(own)));
  }

  // Sets the powers for a step with these elements. With one number, only those change for which an
  // element would be too great: what a row does not attend to changes nothing.
  template <int kTerms>
  __device__ __forceinline__ void set_powers(const float (&x)[kTerms][4]) {
    float greatest[2] = {}, multiples[2];
#pragma unroll
    for (int n = 0; n < kTerms; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) greatest[e / 2] = fmaxf(greatest[e / 2], fabsf(x[n][e]));
    }
    if (kAddsInPlace && !exceed(fmaxf(greatest[0] * powers[0], greatest[1] * powers[1]))) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = greatest_of_row(greatest[half]), old = powers[half];
      if constexpr (!kAddsInPlace) {
        powers[half] = ptx::split_factor(most);
      } else if (most * old > kMost) {
        powers[half] = fmaxf(ptx::split_factor(most) * kHeadroom, kLeastPower);
      }
      multiples[half] = powers[half] / old;
    }
    if constexpr (kAddsInPlace) multiply(multiples);
  }
};

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

// Reads this thread's operands of a warp's 16 rows, in the order of tiles, and returns the
// magnitudes of this thread's rows.
template <int kNumbers, int kNumberSteps>
__device__ __forceinline__ float2 read_operands(uint32_t (&to)[kNumberSteps][4], const float* from,
                                                int64_t stride, int32_t rows, int32_t cols,
                                                bool vectors) {
  constexpr int kSteps = kNumberSteps / kNumbers;
  float read[2][kSteps][4], greatest[2] = {}, powers[2];
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
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    powers[half] = ptx::split_factor(greatest_of_row(greatest[half]));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float (&x)[4] = read[half][k];
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // columns 4 t + e and 4 t + 2 + e are places 8 e + 2 t, + 1
        uint32_t words[kNumbers];
        ptx::split(x[e] * powers[half], x[2 + e] * powers[half], words);
#pragma unroll
        for (int number = 0; number < kNumbers; ++number) {
          to[number * kSteps + k][2 * e + half] = words[number];
        }
      }
    }
  }
#pragma unroll
  for (auto& of : to) keep_operands(of);
  return make_float2(ptx::split_magnitude(powers[0]), ptx::split_magnitude(powers[1]));
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
