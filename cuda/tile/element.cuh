// Defines the element types of kernels for float32 operands: they say how products are computed.
#pragma once

#include <cstdint>
#include <type_traits>

namespace jax_flash {

// Holds a number of 8 bits with four significant ones, e4m3.
struct Float8 {
  uint8_t bits;
};

// Holds a float32 that products round to TF32, which has 11 significant bits.
struct Tf32 {
  float value;
};

// Holds a float32 that products split in two numbers of TF32. The product of two is the sum of the
// three greatest products of their parts, and about as exact as one of float32.
struct Tf32x3 {
  float value;
};

template <typename Element>
inline constexpr bool kIsFloat32 = sizeof(Element) == 4;

// The number of TF32 products that stand for a product of two elements; 0: not float32.
template <typename Element>
inline constexpr int kTf32ProductsOf = std::is_same_v<Element, Tf32x3> ? 3
                                       : std::is_same_v<Element, Tf32> ? 1
                                                                       : 0;

// The columns of a step of the inner dimension of a product: 32 bytes.
template <typename Element>
inline constexpr int kStepCols = 32 / sizeof(Element);

// Calls body(an element of the type that kernels have for it). Element: a type of operands.
template <typename Element, typename Body>
auto with_kernel_element(bool high_precision, Body body) {
  if constexpr (std::is_same_v<Element, float>) {
    return high_precision ? body(Tf32x3{}) : body(Tf32{});
  } else {
    return body(Element{});
  }
}

}  // namespace jax_flash
