// Converts V to float16 before the sm_90 forward kernels for a bias or a mask run;
// plan/half_values.h explains why. half_values_kernel() converts V and checks that float16 can hold
// it; the forward kernel reads the copy if all checks succeeded (HalfValueMap).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/half_values.h"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "sm90/forward/config.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// True for kernels that can read the copy. They also have code for V in bfloat16, for values that
// float16 cannot hold and for calls of few rows (HalfValues::takes()).
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr bool kReadsHalfValues =
    JAX_FLASH_SM90_CONVERT_VALUES && std::is_same_v<Element, __nv_bfloat16> &&
    Config::kOptimistic && is_matrix(kModifiers);

// Gives the forward kernel access to the converted values.
struct HalfValueMap {
  CUtensorMap map;
  BoxAxes axes;
  const int32_t* bad = nullptr;  // a flag per converting block; null: V was not converted
  int32_t blocks = 0;

  // Returns whether all of V can be read in float16. Synchronizes the block, all of whose threads
  // must call it.
  __device__ __forceinline__ bool usable() const {
    if (bad == nullptr) {
      __syncthreads();
      return false;
    }
    ptx::griddepcontrol_wait();
    int32_t found = 0;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) found |= ptx::ld_relaxed(bad + i);
    // A reduction, whose result the compiler knows to be the same in all lanes.
    return __reduce_max_sync(0xffffffff, __syncthreads_or(found)) == 0;
  }
};
struct NoHalfValues {};
template <typename Config, typename Element, uint32_t kModifiers>
using HalfValuesOf =
    std::conditional_t<kReadsHalfValues<Config, Element, kModifiers>, HalfValueMap, NoHalfValues>;

// Describes the kernel's units of work, each some rows of 64 columns of a head.
struct HalfValueCopy {
  static constexpr int kThreads = 256, kChunks = 8;  // chunks of 8 columns
  static constexpr int kLanes = kThreads / kChunks;  // rows at the same time
  static constexpr int kRows = kLanes * 8;           // rows of a unit, at most
  static constexpr int kWarps = kThreads / 32;

  Operand value, half;
  int32_t heads, inner_batch, panels, parts, rows;  // `parts` units of `rows` rows make up all rows
  int32_t kv_len, value_dim, units;
  int32_t* bad;
};

// The least magnitude that float16 cannot hold, 65,536, as bits of bfloat16.
inline constexpr uint32_t kTooGreat = 0x4780;

// Returns whether float16 cannot hold one of two columns, given the magnitudes of their greatest
// values.
__device__ __forceinline__ bool is_bad(uint32_t pair) {
  const auto one = [](uint32_t bits) {
    return bits >= kTooGreat || (bits > 0 && bits < kGreatEnough);
  };
  return one(pair & 0xffff) || one(pair >> 16);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    half_values_kernel(const __grid_constant__ HalfValueCopy copy) {
  using Copy = HalfValueCopy;
  __shared__ uint4 greatest_smem[Copy::kWarps][Copy::kChunks];
  ptx::griddepcontrol_launch_dependents();
  const int chunk = threadIdx.x % Copy::kChunks, lane_row = threadIdx.x / Copy::kChunks;
  bool bad = false;
  for (int32_t unit = blockIdx.x; unit < copy.units; unit += gridDim.x) {
    const int32_t panel = unit % copy.panels, head = unit / copy.panels % copy.heads;
    const int32_t part = unit / copy.panels / copy.heads % copy.parts;
    const int32_t batch = unit / copy.panels / copy.heads / copy.parts;
    const int32_t row0 = part * copy.rows + lane_row;
    const int32_t end = min((part + 1) * copy.rows, copy.kv_len);
    const int32_t col = panel * 64 + chunk * 8;
    const auto at = [&](const Operand& operand) {
      return static_cast<char*>(operand.data) +
             2 * (batch / copy.inner_batch * operand.batch[0] +
                  batch % copy.inner_batch * operand.batch[1] + head * operand.head + col +
                  row0 * operand.row);
    };
    uint32_t greatest[4] = {};
    if (col < copy.value_dim) {
      const char* from = at(copy.value);
      char* to = at(copy.half);
      constexpr int kSteps = Copy::kRows / Copy::kLanes;
      uint4 chunks[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        chunks[i] = uint4{};
        if (row0 + i * Copy::kLanes < end) {
          chunks[i] = *reinterpret_cast<const uint4*>(from + i * Copy::kLanes * 2 * copy.value.row);
        }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const auto convert = [&](uint32_t pair, uint32_t& most) {
          most = __vmaxu2(most, pair & 0x7fff7fff);
          return ptx::cvt_rn_f16x2_bf16x2(pair);
        };
        const uint4 converted = {
            convert(chunks[i].x, greatest[0]), convert(chunks[i].y, greatest[1]),
            convert(chunks[i].z, greatest[2]), convert(chunks[i].w, greatest[3])};
        if (row0 + i * Copy::kLanes < end) {
          *reinterpret_cast<uint4*>(to + i * Copy::kLanes * 2 * copy.half.row) = converted;
        }
      }
    }
#pragma unroll
    for (uint32_t& pair : greatest) {
      for (int distance = Copy::kChunks; distance < 32; distance *= 2) {
        pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffff, pair, distance));
      }
    }
    if (threadIdx.x % 32 < Copy::kChunks) {
      greatest_smem[threadIdx.x / 32][chunk] = {greatest[0], greatest[1], greatest[2], greatest[3]};
    }
    __syncthreads();
    if (threadIdx.x < Copy::kChunks * 4) {
      uint32_t pair = 0;
      for (const auto& of_warp : greatest_smem) {
        pair = __vmaxu2(pair, reinterpret_cast<const uint32_t*>(of_warp)[threadIdx.x]);
      }
      bad = bad || is_bad(pair);
    }
    __syncthreads();
  }
  const int32_t any = __syncthreads_or(bad);
  if (threadIdx.x == 0) copy.bad[blockIdx.x] = any;
  // A kernel that waits for this one thereby waits for the one before it, too.
  ptx::griddepcontrol_wait();
}

}  // namespace jax_flash::sm90
