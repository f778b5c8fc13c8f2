// Copies operands to tiles of float32 scratch memory, and tiles to results.
#pragma once

#include <cstdlib>

#include "host/gemm.h"
#include "host/kernel.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Holds the scratch memory of one task: one allocation, divided into parts of whole cache lines.
class Arena {
 public:
  explicit Arena(int64_t floats)
      : begin_(static_cast<float*>(::aligned_alloc(kAlignment, bytes(floats)))), next_(begin_) {}
  ~Arena() { ::free(begin_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  bool ok() const { return begin_ != nullptr; }
  // `floats` is a multiple of kRowPadding.
  float* take(int64_t floats) {
    float* taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  static int64_t bytes(int64_t floats) {
    return ceil_div(floats * int64_t{sizeof(float)}, kAlignment) * kAlignment;
  }
  float* begin_;
  float* next_;
};

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

JAX_FLASH_INLINE Vec load_vector(const float* p) { return load(p); }

JAX_FLASH_INLINE VecU load_halves(const void* p) {
  VecHalf halves;
  __builtin_memcpy(&halves, p, sizeof halves);
  return __builtin_convertvector(halves, VecU);
}

JAX_FLASH_INLINE Vec load_vector(const BFloat16* p) { return (Vec)(load_halves(p) << 16); }

// Subnormals are converted as integers, because XLA's threads flush subnormals to zero.
JAX_FLASH_INLINE Vec load_vector(const Float16* p) {
  const VecU half = load_halves(p);
  const VecU magnitude = half & 0x7fff;
  const VecU normal = (magnitude << 13) + (112u << 23);
  const VecU special = (magnitude << 13) | 0x7f800000;
  const Vec subnormal = __builtin_convertvector((VecI)magnitude, Vec) * 0x1p-24f;
  const VecU bits = magnitude < 0x0400 ? (VecU)subnormal : magnitude < 0x7c00 ? normal : special;
  return (Vec)(bits | (half & 0x8000) << 16);
}

JAX_FLASH_INLINE void store_vector(float* p, Vec v) { store(p, v); }

JAX_FLASH_INLINE void store_halves(void* p, VecU v) {
  const VecHalf halves = __builtin_convertvector(v, VecHalf);
  __builtin_memcpy(p, &halves, sizeof halves);
}

// Both of the following round to nearest, ties to even.
JAX_FLASH_INLINE void store_vector(BFloat16* p, Vec v) {
  const VecU bits = (VecU)v;
  const VecU rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_halves(p, v == v ? rounded : (bits >> 16 | 0x0040));
}

JAX_FLASH_INLINE void store_vector(Float16* p, Vec v) {
  const VecU sign = (VecU)v & 0x80000000, magnitude = (VecU)v ^ sign;
  const VecU normal = (magnitude - (112u << 23) + 0x0fff + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14 the spacing of float16 is 2^-24, like that of float32 in [0.5, 1). So the addition
  // of 0.5 rounds.
  const VecU subnormal = (VecU)((Vec)magnitude + 0.5f) - 0x3f000000;
  VecU half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= (143u << 23) ? VecU{} + 0x7c00 : half;
  half = magnitude > 0x7f800000 ? VecU{} + 0x7e00 : half;
  store_halves(p, half | sign >> 16);
}

// Loads the first `count` elements of a vector, all if `count` >= kLanes. Zeros follow.
template <typename T>
JAX_FLASH_INLINE Vec load_first(const T* p, int64_t count) {
  if (count >= kLanes) return load_vector(p);
  T elements[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) elements[i] = p[i];
  return load_vector(elements);
}

template <typename T>
JAX_FLASH_INLINE void store_first(T* p, Vec v, int64_t count) {
  if (count >= kLanes) return store_vector(p, v);
  T elements[kLanes];
  store_vector(elements, v);
  for (int64_t i = 0; i < count; ++i) p[i] = elements[i];
}

// Calls f with a typed null pointer for the dtype.
template <typename F>
JAX_FLASH_INLINE auto with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kBFloat16: return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16: return f(static_cast<Float16*>(nullptr));
    case DType::kFloat8:  // refused by the handlers
    case DType::kFloat32: break;
  }
  return f(static_cast<float*>(nullptr));
}

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Describes the rows of an operand of one batch and head, with unit stride along `dim` columns.
struct Rows {
  const void* data;
  DType dtype;
  int64_t row;  // stride
  int dim;
};

// Prefetches the data at p into the second-level cache. p may point anywhere.
JAX_FLASH_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Packs `count` rows from `first` on, times `scale`. Rows that are not alive become zeros, because
// they may hold NaN. Columns from `dim` to `to.row` become zeros, too. Prefetches the `count` rows
// after these, which are usually packed next.
template <typename Alive>
void pack_rows(const Rows& from, int64_t first, int count, float scale, Matrix to, Alive alive) {
  with_type(from.dtype, [&]<typename T>(T*) {
    const T* data = static_cast<const T*>(from.data);
    for (int i = 0; i < count; ++i) {
      const T* in = data + (first + i) * from.row;
      float* out = to.data + i * to.row;
      if (!alive(i)) {
        for (int64_t c = 0; c < to.row; c += kLanes) store(out + c, Vec{});
        continue;
      }
      for (int64_t c = 0; c < to.row; c += kLanes) {
        prefetch(in + count * from.row + c);
        store(out + c, c < from.dim ? load_first(in + c, from.dim - c) * scale : Vec{});
      }
    }
  });
}

// Packs `count` rows from `first` on as columns: to[d][c] for d < padded(dim). Columns from `count`
// to the next whole vector become zeros. Prefetches as pack_rows() does.
inline void pack_columns(const Rows& from, int64_t first, int count, Matrix to) {
  with_type(from.dtype, [&]<typename T>(T*) {
    const T* data = static_cast<const T*>(from.data);
    for (int c = 0; c < count; c += kLanes) {
      for (int d = 0; d < from.dim; d += kLanes) {
        Vec block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const T* in = data + (first + min_of(c + i, count - 1)) * from.row + d;
          prefetch(in + count * from.row);
          block[i] = c + i < count ? load_first(in, from.dim - d) : Vec{};
        }
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(to.data + (d + i) * to.row + c, block[i]);
      }
    }
  });
}

// Loads the first `count` elements of a vector, which are `stride` apart. Zeros follow.
template <typename T>
JAX_FLASH_INLINE Vec load_first_strided(const T* p, int64_t stride, int count) {
  if (stride == 1) return load_first(p, count);
  T elements[kLanes] = {};
  for (int i = 0; i < min_of(count, kLanes); ++i) elements[i] = p[i * stride];
  return load_vector(elements);
}

// Writes `count` floats, `stride` apart.
inline void store_strided(const float* from, int count, void* data, DType dtype, int64_t stride) {
  with_type(dtype, [&]<typename T>(T*) {
    T* out = static_cast<T*>(data);
    for (int c = 0; c < count; c += kLanes) {
      if (stride == 1) {
        store_first(out + c, load(from + c), count - c);
        continue;
      }
      T elements[kLanes];
      store_vector(elements, load(from + c));
      for (int i = 0; i < min_of(count - c, kLanes); ++i) out[(c + i) * stride] = elements[i];
    }
  });
}

// Writes `count` rows to the rows of an operand from `first` on.
inline void write_rows(Matrix from, int count, const Rows& to, int64_t first) {
  char* data = static_cast<char*>(const_cast<void*>(to.data));
  for (int r = 0; r < count; ++r) {
    store_strided(from.data + r * from.row, to.dim, data + (first + r) * to.row * size_of(to.dtype),
                  to.dtype, 1);
  }
}

inline void clear(Matrix m, int64_t rows) {
  for (int64_t c = 0; c < rows * m.row; c += kLanes) store(m.data + c, Vec{});
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
