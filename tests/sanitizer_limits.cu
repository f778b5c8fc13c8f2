// What the kernels for sm_90 do between threads and copies, each in a small kernel of its own that
// is right, and one each with the order missing: what NVIDIA's compute-sanitizer reports of these
// tells whether it follows the instructions. sanitize.py compiles and runs this.
//
//     nvcc -std=c++20 -I cuda -gencode arch=compute_90a,code=sm_90a tests/sanitizer_limits.cu
//     compute-sanitizer --tool racecheck ./a.out named_arrive mbarrier_leader
//
// Prints for each kernel whether its results are right.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace ptx = jax_flash::ptx;

constexpr int kBlocks = 2, kGroup = 128, kThreads = 2 * kGroup, kRounds = 6, kStages = 2;
constexpr int kTile = kGroup * 4;  // floats: what a group handles at a time, 16 bytes a thread
constexpr int kResults = kBlocks * kRounds * kTile;

// How accesses of one group of threads are ordered before those of another, or before copies.
enum Order : int {
  kSync,         // named barriers at which both wait
  kArrive,       // named barriers at which one waits, and the other does not
  kLeftover,     // as kArrive, and the last arrival has nobody who waits for it
  kThread,       // mbarriers, every thread arrives
  kFence,        // the same, after fence.proxy.async
  kLeader,       // mbarriers, a thread of each warp arrives, after __syncwarp()
  kLeaderFence,  // the same, after fence.proxy.async
  kStarter,  // as kThread; fence.proxy.async by the thread that starts a copy, behind the barrier
  kWrong     // as kArrive or kThread, but a place is called empty before it has been read
};

__device__ int group_index() { return __reduce_max_sync(0xffffffff, threadIdx.x / kGroup); }
__device__ int group_thread() { return threadIdx.x % kGroup; }

__device__ float number(int index) { return static_cast<float>(index % 8191); }

__device__ void write_place(uint32_t place, int index) {
  const auto word = [&](int i) { return __float_as_uint(number(index + i)); };
  ptx::st_shared_v4(place + group_thread() * 16, {word(0), word(1), word(2), word(3)});
}
__device__ void read_place(uint32_t place, float* results, int index) {
  reinterpret_cast<uint4*>(results + index)[0] = ptx::ld_shared_v4(place + group_thread() * 16);
}
__device__ int result_index(int round) {
  return (blockIdx.x * kRounds + round) * kTile + group_thread() * 4;
}

template <Order kOrder>
constexpr bool kByLeader = kOrder == kLeader || kOrder == kLeaderFence;
template <Order kOrder>
constexpr int kArrivals = kByLeader<kOrder> ? kGroup / 32 : kGroup;

template <Order kOrder>
__device__ void arrive(uint32_t barrier) {
  if (kOrder == kFence || kOrder == kLeaderFence) ptx::fence_proxy_async_shared();
  if (kByLeader<kOrder>) __syncwarp();
  if (!kByLeader<kOrder> || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// One group fills a single place, the other one reads it: named barriers, as PTX's description of
// `barrier` has them for a producer and a consumer.
template <Order kOrder>
__device__ void named_barriers(float* results) {
  __shared__ __align__(128) float place_smem[kTile];
  const uint32_t place = ptx::shared_address(place_smem);
  enum { kFull = 1, kEmpty = 2 };
  const auto release = [&](int round) {
    if (round + 1 == kRounds && kOrder != kLeftover) return;
    kOrder == kSync ? ptx::barrier_sync(kEmpty, kThreads) : ptx::barrier_arrive(kEmpty, kThreads);
  };
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    if (group_index() == 1) {
      if (round > 0) ptx::barrier_sync(kEmpty, kThreads);
      write_place(place, result_index(round));
      kOrder == kSync ? ptx::barrier_sync(kFull, kThreads) : ptx::barrier_arrive(kFull, kThreads);
    } else {
      ptx::barrier_sync(kFull, kThreads);
      if (kOrder == kWrong) release(round);
      read_place(place, results, result_index(round));
      if (kOrder != kWrong) release(round);
    }
  }
}

// One group hands numbers over to the other, warps of one parity to those of the same, at named
// barriers where it does not wait. Then all threads meet, and the first group reads what the other
// one has made of them.
__device__ void hand_over(float* results) {
  __shared__ __align__(128) float handed_smem[kTile], place_smem[kTile];
  const uint32_t handed = ptx::shared_address(handed_smem), place = ptx::shared_address(place_smem);
  const int barrier = 1 + threadIdx.x / 32 % 2;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    __syncthreads();
    if (group_index() == 1) {
      write_place(handed, result_index(round));
      ptx::barrier_arrive(barrier, kGroup);
    } else {
      ptx::barrier_sync(barrier, kGroup);
      ptx::st_shared_v4(place + group_thread() * 16,
                        ptx::ld_shared_v4(handed + group_thread() * 16));
    }
    __syncthreads();
    if (group_index() == 1) read_place(place, results, result_index(round));
  }
}

struct Ring {
  uint32_t places, barriers;
  __device__ uint32_t place(int round) const { return places + round % kStages * kTile * 4; }
  __device__ uint32_t full(int round) const { return barriers + round % kStages * 8; }
  __device__ uint32_t empty(int round) const { return full(round) + kStages * 8; }
  __device__ static uint32_t parity(int round) { return round / kStages & 1; }

  __device__ void init(int fill_arrivals, int read_arrivals) const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(full(stage), fill_arrivals);
        ptx::mbarrier_init(empty(stage), read_arrivals);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }
};

// One group fills places in turn with ordinary stores, the other one reads them.
template <Order kOrder>
__device__ void mbarrier_ring(float* results) {
  __shared__ __align__(128) float places_smem[kStages * kTile];
  __shared__ __align__(8) uint64_t barriers_smem[2 * kStages];
  const Ring ring{ptx::shared_address(places_smem), ptx::shared_address(barriers_smem)};
  ring.init(kArrivals<kOrder>, kArrivals<kOrder>);
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    if (group_index() == 1) {
      ptx::mbarrier_wait(ring.empty(round), ring.parity(round) ^ 1);
      write_place(ring.place(round), result_index(round));
      arrive<kOrder>(ring.full(round));
    } else {
      ptx::mbarrier_wait(ring.full(round), ring.parity(round));
      if (kOrder == kWrong) arrive<kOrder>(ring.empty(round));
      read_place(ring.place(round), results, result_index(round));
      if (kOrder != kWrong) arrive<kOrder>(ring.empty(round));
    }
  }
}

// Bulk copies of one thread fill the places, a group reads them. What threads have read and what a
// copy writes next are accesses of different proxies, between which PTX asks for a fence on the way
// from one to the other, by whichever thread of the block: kThread and kLeader do without it.
template <Order kOrder>
__device__ void copy_ring(const float* numbers, float* results) {
  __shared__ __align__(128) float places_smem[kStages * kTile];
  __shared__ __align__(8) uint64_t barriers_smem[2 * kStages];
  const Ring ring{ptx::shared_address(places_smem), ptx::shared_address(barriers_smem)};
  ring.init(1, kArrivals<kOrder>);
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    if (group_index() == 1) {
      if (group_thread() > 0) continue;
      ptx::mbarrier_wait(ring.empty(round), ring.parity(round) ^ 1);
      if (kOrder == kStarter) ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive_expect_tx(ring.full(round), kTile * 4);
      ptx::cp_async_bulk_load(ring.place(round), numbers + result_index(round), kTile * 4,
                              ring.full(round));
    } else {
      ptx::mbarrier_wait(ring.full(round), ring.parity(round));
      if (kOrder == kWrong) arrive<kOrder>(ring.empty(round));
      read_place(ring.place(round), results, result_index(round));
      if (kOrder != kWrong) arrive<kOrder>(ring.empty(round));
    }
  }
}

enum Copy : int { kBulk, kTensor, kReduce };

// A group writes a place, from where a copy takes it to global memory before it is written again.
template <Copy kCopy, int kWritten, Order kOrder = kFence>
__device__ void copy_out(const CUtensorMap& map, float* results) {
  __shared__ __align__(128) float place_smem[kTile];
  const uint32_t place = ptx::shared_address(place_smem);
  if (threadIdx.x >= kGroup) return;
#pragma unroll 1
  for (int round = 0; round < kWritten; ++round) {
    write_place(place, result_index(round));
    if (kOrder == kFence) ptx::fence_proxy_async_shared();
    ptx::barrier_sync(1, kGroup);
    if (threadIdx.x == 0) {
      if (kOrder == kStarter) ptx::fence_proxy_async_shared();
      float* const to = results + result_index(round);
      if (kCopy == kTensor) {
        ptx::cp_async_bulk_tensor_store_5d(map, place, 0, (blockIdx.x * kRounds + round) * 4, 0, 0,
                                           0);
      } else if (kCopy == kReduce) {
        ptx::cp_reduce_async_bulk_add_f32(to, place, kTile * 4);
      } else {
        ptx::cp_async_bulk_store(to, place, kTile * 4);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group<0>();
    }
    ptx::barrier_sync(2, kGroup);
  }
}

using Map = CUtensorMap;
#define KERNEL(name, call) \
  __global__ void name(const __grid_constant__ Map map, const float* in, float* out) { call; }
KERNEL(named_sync, named_barriers<kSync>(out))
KERNEL(named_arrive, named_barriers<kArrive>(out))
KERNEL(named_leftover, named_barriers<kLeftover>(out))
KERNEL(named_wrong, named_barriers<kWrong>(out))
KERNEL(named_hand_over, hand_over(out))
KERNEL(mbarrier_threads, mbarrier_ring<kThread>(out))
KERNEL(mbarrier_leader, mbarrier_ring<kLeader>(out))
KERNEL(mbarrier_wrong, mbarrier_ring<kWrong>(out))
KERNEL(copy_threads, copy_ring<kThread>(in, out))
KERNEL(copy_fence, copy_ring<kFence>(in, out))
KERNEL(copy_leader, copy_ring<kLeader>(in, out))
KERNEL(copy_leader_fence, copy_ring<kLeaderFence>(in, out))
KERNEL(copy_starter_fence, copy_ring<kStarter>(in, out))
KERNEL(copy_wrong, copy_ring<kWrong>(in, out))
KERNEL(out_fence, (copy_out<kBulk, kRounds, kFence>(map, out)))
KERNEL(out_starter_fence, (copy_out<kBulk, kRounds, kStarter>(map, out)))
KERNEL(out_wrong, (copy_out<kBulk, kRounds, kThread>(map, out)))
KERNEL(store_bulk, (copy_out<kBulk, kRounds>(map, out)))
KERNEL(store_tensor, (copy_out<kTensor, kRounds>(map, out)))
KERNEL(store_reduce, (copy_out<kReduce, kRounds>(map, out)))
KERNEL(store_wrong, (copy_out<kBulk, kRounds - 1>(map, out)))

__global__ void read_results(const float* in, float* out) {
  for (int i = threadIdx.x; i < kResults; i += blockDim.x) out[i] = in[i];
}

struct Entry {
  const char* name;
  void (*kernel)(const Map, const float*, float*);
};
#define ENTRY(name) {#name, name}
const Entry kEntries[] = {
    ENTRY(named_sync),         ENTRY(named_arrive),    ENTRY(named_leftover),
    ENTRY(named_wrong),        ENTRY(named_hand_over), ENTRY(mbarrier_threads),
    ENTRY(mbarrier_leader),    ENTRY(mbarrier_wrong),  ENTRY(copy_threads),
    ENTRY(copy_fence),         ENTRY(copy_leader),     ENTRY(copy_leader_fence),
    ENTRY(copy_starter_fence), ENTRY(copy_wrong),      ENTRY(out_fence),
    ENTRY(out_starter_fence),  ENTRY(out_wrong),       ENTRY(store_bulk),
    ENTRY(store_tensor),       ENTRY(store_reduce),    ENTRY(store_wrong)};

bool check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(error));
  return error == cudaSuccess;
}

// 128 floats a row, 4 rows a tile.
Map make_map(float* results) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const cuuint64_t dims[5] = {128, kResults / 128, 1, 1, 1};
  const cuuint64_t strides[4] = {512, 16, 16, 16};
  const cuuint32_t box[5] = {128, kTile / 128, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  Map map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, results, dims, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) std::printf("tensor map: error %d\n", static_cast<int>(status));
  return map;
}

bool run(const Entry& entry) {
  std::vector<float> numbers(kResults), found(kResults);
  for (int i = 0; i < kResults; ++i) numbers[i] = static_cast<float>(i % 8191);
  const size_t bytes = kResults * sizeof(float);
  float *in, *out, *read;
  if (!check(cudaMalloc(&in, bytes), "in") || !check(cudaMalloc(&out, bytes), "out") ||
      !check(cudaMalloc(&read, bytes), "read")) {
    return false;
  }
  check(cudaMemcpy(in, numbers.data(), bytes, cudaMemcpyHostToDevice), "numbers");
  // All of it is to be written by what is looked at, but where that adds.
  if (std::strcmp(entry.name, "store_reduce") == 0) check(cudaMemset(out, 0, bytes), "zeros");
  entry.kernel<<<kBlocks, kThreads>>>(make_map(out), in, out);
  read_results<<<1, 256>>>(out, read);
  check(cudaMemcpy(found.data(), read, bytes, cudaMemcpyDeviceToHost), entry.name);
  const bool right = found == numbers;
  std::printf("%s: %s\n", entry.name, right ? "right" : "wrong");
  for (float* array : {in, out, read}) cudaFree(array);
  return right;
}

int main(int count, char** names) {
  bool right = true;
  for (const Entry& entry : kEntries) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted |= std::strcmp(names[i], entry.name) == 0;
    const bool is_right = !wanted || run(entry);
    right &= is_right || std::strstr(entry.name, "wrong") != nullptr;
  }
  return right ? 0 : 1;
}
