// The attention kernel on the CPU, for the instruction set JAX_FLASH_ISA.
//
// A tile of queries meets one tile of keys and values at a time, everything in
// float32 whatever the operands' dtype (converted as they are packed):
//
//   forward    S = (scale Q) K^T        P = exp(S - max)        O = O alpha + P V
//   backward   S, dP = dO V^T           P = exp(S - lse)        dS = P (dP - delta)
//              dV += P^T dO             dK += dS^T (scale Q)    dQ += dS K
//
// All matrix products go through one microkernel (gemm.h), whose left operand is
// read by broadcasts from anywhere, so that transposing it is free, and whose right
// operand is packed row by row. Only K and V need transposing, as they are packed.
//
// Which elements of a tile may be attended to is one 64-bit word a row (tile.h).
// Tiles without any are skipped; tiles, rows and columns without any are left out of
// the products; an element that is masked is selected away, never multiplied by 0.
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
