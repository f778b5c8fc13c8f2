// Computes attention on the CPU, with the instruction set JAX_FLASH_ISA.
//
// A step combines a query tile with a tile of keys and values. All numbers are float32:
// operands of other dtypes are converted when they are packed.
//
//   forward    S = (scale Q) K^T    P = exp(S - max)        O = O exp(max_old - max) + P V
//   backward   S, dP = dO V^T       P = exp(S - lse)        dS = P (dP - delta)
//              dV += P^T dO         dK += dS^T (scale Q)    dQ += dS K
//
// One microkernel (gemm.h) computes all matrix products. It broadcasts single elements of its left
// operand, which may therefore be transposed at no cost. Its right operand is packed row by row.
// Only K and V need to be transposed, when they are packed.
//
// For each row of a tile, a 64-bit word has a bit for each element that may be attended to
// (tile.h). Tiles without such elements are skipped. The products leave out leading and trailing
// rows, and trailing columns, without such elements. Masked elements are replaced by a select and
// never multiplied by 0, which would keep a NaN.
#include "host/kernel.h"

#include "host/backward.h"
#include "host/dbias.h"
#include "host/forward.h"

#define JAX_FLASH_TEXT_(name) #name
#define JAX_FLASH_TEXT(name) JAX_FLASH_TEXT_(name)

namespace jax_flash::host::JAX_FLASH_ISA {

extern const Kernel kKernel = {
    JAX_FLASH_TEXT(JAX_FLASH_ISA), forward_task, delta_task, backward_task, reduce_dquery_task,
    reduce_distance_task,          dbias_task,
};

}  // namespace jax_flash::host::JAX_FLASH_ISA
