// Makes tensor maps on the host, from which the copy engine (TMA) finds the tiles of an operand,
// and starts copies of tiles on the device.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "params.h"
#include "plan/tensor_map.h"
#include "ptx/tma.cuh"
#include "status.h"
#include "tile/batch_index.cuh"

namespace jax_flash {

// Returns cuTensorMapEncodeTiled, or null if the driver lacks it. It is found through the runtime:
// the library does not link the driver, so that it also loads on machines without one.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// Makes a map of [batch, rows, heads, cols], with elements of 8 or 16 bits, for boxes of box_rows
// rows of box_heads heads by box_cols columns. A row of a box has 128 bytes, swizzled like
// SmemTile, or 64 bytes; box_cols = 0 means 128 bytes. Axes of stride 0 are omitted: see
// load_box().
inline Status make_tensor_map(const char* name, const Shape& shape, const Operand& operand,
                              int64_t rows, int64_t heads, int64_t cols, int box_rows,
                              CUtensorMap& map, int box_heads = 1,
                              CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              int box_cols = 0) {
  const int bytes = operand.dtype == DType::kFloat8 ? 1 : 2;
  if (box_cols == 0) box_cols = 128 / bytes;
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) {
    return Status::internal("jax_flash: the CUDA driver has no cuTensorMapEncodeTiled");
  }
  const int64_t sizes[4] = {rows, heads, shape.batch_dims[0],
                            shape.num_batch_dims > 1 ? shape.batch_dims[1] : 1};
  const int64_t strides[4] = {operand.row, operand.head, operand.batch[0], operand.batch[1]};
  cuuint64_t global_dims[5] = {static_cast<cuuint64_t>(cols)};
  cuuint64_t global_strides[4];
  for (int axis = 0; axis < 4; ++axis) {
    const bool broadcast = strides[axis] == 0 || sizes[axis] == 1;
    global_dims[axis + 1] = broadcast ? 1 : static_cast<cuuint64_t>(sizes[axis]);
    global_strides[axis] = broadcast ? 16 : static_cast<cuuint64_t>(strides[axis]) * bytes;
  }
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_heads), 1, 1};
  const CUtensorMapSwizzle swizzle =
      box_cols * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = operand.dtype == DType::kFloat8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : operand.dtype == DType::kBFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(&map, type, 5, operand.data, global_dims, global_strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return Status::internal(std::string("jax_flash: cannot make a tensor map of ") + name +
                          ": CUDA error " + std::to_string(static_cast<int>(result)));
}

struct ForwardMaps {
  CUtensorMap query, key, value;
};

// Makes maps for tiles of query_rows queries, of query_heads heads, and of key_rows keys.
inline Status make_forward_maps(
    const Forward& params, int query_rows, int key_rows, ForwardMaps& maps, int query_heads = 1,
    CUtensorMapL2promotion of_keys = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const Shape& s = params.shape;
  Status status = make_tensor_map("query", s, params.query, s.q_len, s.heads, s.head_dim,
                                  query_rows, maps.query, query_heads);
  if (status.ok()) {
    status = make_tensor_map("key", s, params.key, s.kv_len, s.kv_heads, s.head_dim, key_rows,
                             maps.key, 1, of_keys);
  }
  if (status.ok()) {
    status = make_tensor_map("value", s, params.value, s.kv_len, s.kv_heads, s.value_dim, key_rows,
                             maps.value, 1, of_keys);
  }
  return status;
}

// Holds 1 for each axis that an operand's map has, 0 for each that is omitted. The coordinate of an
// omitted axis must be 0.
struct BoxAxes {
  int32_t row, head, batch[kTensorMapBatchDims];

  BoxAxes() = default;
  explicit BoxAxes(const Operand& operand)
      : row(operand.row != 0),
        head(operand.head != 0),
        batch{operand.batch[0] != 0, operand.batch[1] != 0} {}
};

// Holds the address and strides of an operand [batch, T, N, ...] or [batch, N, T] with as many
// batch axes as a tensor map has.
struct RowsOperand {
  void* data = nullptr;
  int64_t batch[kTensorMapBatchDims] = {}, head = 0, row = 0;  // in elements

  RowsOperand() = default;
  explicit RowsOperand(const Operand& operand)
      : data(operand.data),
        batch{operand.batch[0], operand.batch[1]},
        head(operand.head),
        row(operand.row) {}

  // Returns the address of a row. `index`: its coordinates along the batch axes, and its head.
  template <typename Element, typename Index>
  __device__ __forceinline__ Element* at(const Index& index, int32_t row0) const {
    return static_cast<Element*>(data) + index.batch_axes[0] * batch[0] +
           index.batch_axes[1] * batch[1] + index.head * head + row0 * row;
  }
};

// Returns the coordinate of `index` along an axis of an operand, which the map omits if its stride
// is 0.
__device__ __forceinline__ int32_t tensor_map_coordinate(int64_t stride, int64_t index) {
  return stride == 0 ? 0 : static_cast<int32_t>(index);
}

// Starts the copy of a box to shared memory: rows from row0 and 64 columns from col0 on of a head.
// Called by one thread, which has announced the bytes at the barrier.
__device__ __forceinline__ void load_box(uint32_t address_smem, const CUtensorMap& map,
                                         uint32_t barrier_smem, const BoxAxes& axes,
                                         const int32_t (&batch)[kTensorMapBatchDims], int32_t head,
                                         int32_t row0, int32_t col0) {
  ptx::cp_async_bulk_tensor_5d(address_smem, map, barrier_smem, col0, axes.row * row0,
                               axes.head * head, axes.batch[0] * batch[0],
                               axes.batch[1] * batch[1]);
}

// Does the same for an operand of which only its strides are known.
__device__ __forceinline__ void load_box(uint32_t address_smem, const CUtensorMap& map,
                                         uint32_t barrier_smem, const Operand& operand,
                                         const BatchIndex& batch, int32_t head, int32_t row0,
                                         int32_t col0) {
  ptx::cp_async_bulk_tensor_5d(address_smem, map, barrier_smem, col0,
                               tensor_map_coordinate(operand.row, row0),
                               tensor_map_coordinate(operand.head, head),
                               tensor_map_coordinate(operand.batch[0], batch.coordinate[0]),
                               tensor_map_coordinate(operand.batch[1], batch.coordinate[1]));
}

// Starts the copies of all boxes of a tile: rows from row0 on of a head. `Axes` and `Batch` are as
// load_box() takes them. Called by one thread, which has announced the bytes at the barrier.
template <typename Tile, typename Axes, typename Batch>
__device__ __forceinline__ void load_panels(const Tile& tile, const CUtensorMap& map,
                                            uint32_t barrier_smem, const Axes& axes,
                                            const Batch& batch, int32_t head, int32_t row0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    load_box(tile.root + tile.offset + panel * Tile::kPanelBytes, map, barrier_smem, axes, batch,
             head, row0, panel * Tile::kPanelCols);
  }
}

// Starts a copy as load_box() does, to every block of the cluster in `blocks`.
__device__ __forceinline__ void load_box_multicast(uint32_t address_smem, const CUtensorMap& map,
                                                   uint32_t barrier_smem, uint16_t blocks,
                                                   const BoxAxes& axes,
                                                   const int32_t (&batch)[kTensorMapBatchDims],
                                                   int32_t head, int32_t row0, int32_t col0) {
  ptx::cp_async_bulk_tensor_multicast_5d(address_smem, map, barrier_smem, blocks, col0,
                                         axes.row * row0, axes.head * head,
                                         axes.batch[0] * batch[0], axes.batch[1] * batch[1]);
}

// Starts a prefetch of the same box to L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, const Operand& operand,
                                             const BatchIndex& batch, int32_t head, int32_t row0,
                                             int32_t col0) {
  ptx::cp_async_bulk_prefetch_tensor_5d(
      map, col0, tensor_map_coordinate(operand.row, row0),
      tensor_map_coordinate(operand.head, head),
      tensor_map_coordinate(operand.batch[0], batch.coordinate[0]),
      tensor_map_coordinate(operand.batch[1], batch.coordinate[1]));
}

}  // namespace jax_flash
