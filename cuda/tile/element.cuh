// Defines element types of kernels: FP8, and types that select how float32 operands are multiplied.
#pragma once

#include <cstdint>
#include <type_traits>

namespace jax_flash {

// Holds a number of 8 bits with four significant bits, e4m3.
struct Float8 {
  uint8_t bits;
};

// Selects products in TF32: operands are rounded to its 11 significant bits.
struct Tf32 {
  float value;
};

// Selects split products: each operand is split into two numbers of TF32, and a product is the sum
// of the three greatest products of these parts. It is about as exact as one of float32.
struct Tf32x3 {
  float value;
};

// Selects products in float32, which tensor cores do not have: for a single row (decode/one_row.cuh
// of sm_80).
struct Float32 {
  float value;
};

template <typename Element>
inline constexpr bool kIsFloat32 = sizeof(Element) == 4;
template <typename Element>
inline constexpr bool kIsFloat8 = std::is_same_v<Element, Float8>;

// The number of TF32 products for a product of two elements; 0: products are not of TF32.
template <typename Element>
inline constexpr int kTf32ProductsOf = std::is_same_v<Element, Tf32x3> ? 3
                                       : std::is_same_v<Element, Tf32> ? 1
                                                                       : 0;

// The columns of one step along the inner dimension of a product: 32 bytes.
template <typename Element>
inline constexpr int kStepCols = 32 / sizeof(Element);

// Calls body(element), with an element of the type that kernels use for operands of type Element.
template <typename Element, typename Body>
auto with_kernel_element(bool exact, Body body) {
  if constexpr (std::is_same_v<Element, float>) {
    return exact ? body(Tf32x3{}) : body(Tf32{});
  } else {
    return body(Element{});
  }
}

}  // namespace jax_flash
