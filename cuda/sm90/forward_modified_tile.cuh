// A tile's modifier in kernels for a single one: what of it is read ahead, or found out before the
// scores are there, and exponentials beside it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "sm90/forward_bias.cuh"
#include "sm90/forward_modified.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/forward_plan.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers>
struct ModifiedTile {
  static constexpr int kN = Config::kBlockKv / 8;
  // With bits: what is allowed is known before the scores are.
  static constexpr bool kBits = kModifiers == kMask || kModifiers == kSegments;
  static constexpr bool kBiased = kModifiers == kBias, kCapped = kModifiers == kSoftCap;
  // Whether what the next tile needs is found out beside the exponentials of this one, or, where
  // there are no registers for it, when it is needed.
  static constexpr bool kLooksAhead = kBits && Config::kOptimistic;
  // Blocks whose elements are forbidden together: by measurement.
  static constexpr int kForbidBlocks = Config::kHeadDim / 64;
  using Scores = float[1][kN][4];

  const Forward& params;
  const ForwardPlan& plan;
  // Of a bias that is read ahead: 2-byte elements are those of the operands.
  static constexpr bool kBoxes = kBiased && Config::kBiasBoxes;
  using BiasType = std::conditional_t<kBoxes, Element, float>;
  std::conditional_t<kBoxes, BiasBox<Config::kBlockKv>, BiasTile<kN>> bias;
  typename BiasTile<kN>::Rows bias_rows;
  int bias_reads_ahead;
  MaskBytes<kN> mask;
  typename MaskBytes<kN>::Rows mask_rows;
  AllowedBits allowed, next_allowed;
  bool all_allowed, next_all_allowed;
  int cap_terms;  // of the soft cap's polynomial: 2, 3, or 0 if they were too few

  __device__ __forceinline__ ModifiedTile(const Forward& forward, const ForwardPlan& planned,
                                          const ForwardSmem<Config>& smem, int group)
      : params(forward), plan(planned) {
    if constexpr (kBiased) {  // to a register: a constant would be loaded for each tile
      bias_reads_ahead = __reduce_max_sync(0xffffffff, plan.modifiers.vectors);
    }
    if constexpr (kBoxes) {
      bias.init(smem.own(group * 4), smem.bias_full(group), smem.bias_empty(group),
                params.bias.row == 0);
    } else if constexpr (kBiased) {
      bias.init(smem.own(threadIdx.x / 32 - 4));
    }
    if constexpr (kCapped) {
      const SoftCapPlan& cap = plan.modifiers.soft_cap;
      cap_terms = cap.limit2 > 0.0f ? 2 : cap.limit3 > 0.0f ? 3 : 0;
    }
  }

  // Whether mask and bias are read a tile ahead: where they lie in vectors.
  __device__ __forceinline__ bool reads_ahead() const {
    if constexpr (kBiased) return bias_reads_ahead;
    return plan.modifiers.vectors;
  }

  // A query tile: the warp's rows are those from row0 on.
  __device__ __forceinline__ void begin(const QueryWork& work, int32_t row0) {
    if constexpr (kModifiers == kMask && kLooksAhead) mask_rows = rows_of_mask(work, row0);
    if constexpr (kBiased && !kBoxes) {
      bias_rows = BiasTile<kN>::rows(params.bias.row, row0, plan.q_len);
    }
  }
  __device__ __forceinline__ auto rows_of_mask(const QueryWork& work, int32_t row0) const {
    return MaskBytes<kN>::rows(static_cast<const uint8_t*>(params.mask.data) + work.modifiers.mask,
                               params.mask.row, row0, plan.q_len);
  }
  // Of the bias, if warps copy it, or the bytes of the mask, if there is such a tile. With
  // kLooksAhead, there has to be, and there are no branches.
  __device__ __forceinline__ void read_ahead(const QueryWork& work, int32_t row0, int32_t tile) {
    const int32_t col0 = tile * Config::kBlockKv;
    if constexpr (kModifiers == kMask) {
      if constexpr (!kLooksAhead) {
        mask = {};  // or registers would be kept for what was there
        if (tile < 0 || !reads_ahead()) return;
        mask_rows = rows_of_mask(work, row0);
      }
      mask.load(mask_rows, col0, reads_ahead() ? plan.kv_len : 0);
    } else if constexpr (kBiased && !kBoxes) {
      if (tile < 0 || !reads_ahead()) return;
      const auto* data = static_cast<const float*>(params.bias.data);
      bias.copy(data + work.modifiers.bias + col0, bias_rows, plan.kv_len - col0);
    }
  }
  // From the mask's bytes of the next tile to its bits, and the bytes of the tile behind it.
  __device__ __forceinline__ void look_ahead(const QueryWork& work, int32_t row0, int32_t behind) {
    if constexpr (kModifiers == kMask) {
      next_allowed = mask.bits();
      next_all_allowed = all_of(next_allowed);
      read_ahead(work, row0, min(behind, work.end - 1));
    }
  }
  // Before a tile's scores are there.
  __device__ __forceinline__ void prepare(const QueryWork& work, int32_t row0, int32_t tile,
                                          bool edge, bool one_segment) {
    if constexpr (kBits) {
      const Band& band = work.band;
      const int32_t col0 = tile * Config::kBlockKv;
      const Extent extent = {band.q_len, band.kv_len};
      allowed = {kAllBits<kN>, kAllBits<kN>};
      all_allowed = true;
      if constexpr (kModifiers == kMask) {
        if (!reads_ahead()) {
          allowed = mask_bits<kN>(params.mask, work.modifiers.mask, row0, col0, extent);
          all_allowed = all_of(allowed);
        } else if constexpr (kLooksAhead) {
          allowed = next_allowed;
          all_allowed = next_all_allowed;
        } else {
          allowed = mask.bits();
          all_allowed = all_of(allowed);
        }
      } else if (!one_segment) {
        allowed = segment_bits<kN>(params, work.modifiers, row0, col0, extent);
        all_allowed = all_of(allowed);
      }
      if (edge) {
        forbid_edges(allowed, band, row0, col0);
        all_allowed = all_of(allowed);
      }
    } else if constexpr (kBiased) {
      if (reads_ahead()) bias.wait();
    }
  }
  static __device__ __forceinline__ bool all_of(const AllowedBits& bits) {
    return __reduce_and_sync(0xffffffff, bits.row[0] & bits.row[1]) == kAllBits<kN>;
  }

  __device__ __forceinline__ void forbid_all(Scores& scores) const {
    if (all_allowed) return;
#pragma unroll
    for (int n = 0; n < kN; n += kForbidBlocks) forbid<kForbidBlocks>(scores[0], allowed, n);
  }
  // From what was read ahead.
  __device__ __forceinline__ void add_bias(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float addends[2][4];
      bias.template read<BiasType>(addends, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[0][n + e / 4][e % 4];
        score = fmaf(score, params.options.scale, addends[e / 4][e % 4]);
      }
    }
  }
  // Exponentials of products with the bias added. Every row has a reference.
  __device__ __forceinline__ void biased_exponentials(Scores& scores,
                                                      OnlineSoftmax<1>& softmax) const {
    const float factor = params.options.scale * kLog2E;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shift[half] = to_log2_units(softmax.reference[0][half], kLog2E);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float addends[2][4];
      bias.template read<BiasType>(addends, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[0][n + e / 4][e % 4];
        const float offset = fmaf(addends[e / 4][e % 4], kLog2E, -shift[e % 4 / 2]);
        score = ptx::ex2_approx_ftz(fmaf(score, factor, offset));
        softmax.sum[0][e % 4 / 2] += score;
      }
    }
  }
  // Exponentials of a tile that no edge cuts, with what the call does to its products side by side:
  // in one block of code, in which the assembler mixes them. `longer`: by the longer polynomial of
  // the soft cap. Returns whether products are too great for it. What `beside` does, so has no
  // branches, is mixed in, too.
  template <typename Beside>
  __device__ __forceinline__ bool exponentials(Scores& scores, OnlineSoftmax<1>& softmax,
                                               float to_log2, bool longer, Beside beside) {
    const auto all = [&](auto modify) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (n == kN / 4) beside();
        modify(scores[0][n], n);
        softmax.exponentials(scores[0][n], 0, to_log2);
      }
    };
    if constexpr (kBits) {
      if (all_allowed) {
        all([](float (&)[4], int) {});
      } else {
        all([&](float (&)[4], int n) {
          if (n % kForbidBlocks == 0) forbid<kForbidBlocks>(scores[0], allowed, n);
        });
      }
    } else if constexpr (kCapped) {
      const SoftCapPlan& cap = plan.modifiers.soft_cap;
      float shift[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = softmax.reference[0][half];
        shift[half] = reference == minus_infinity() ? 0.0f : to_log2_units(reference, to_log2);
      }
      const auto capped = [&](const auto& terms, float offset) {
        uint32_t seen = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          soft_cap_exponentials(scores[0][n], terms, offset, shift, softmax.sum[0], seen);
        }
        return exceeds(seen, offset);
      };
      return longer ? capped(cap.factor3, cap.offset3) : capped(cap.factor2, cap.offset2);
    }
    return false;
  }
};

}  // namespace jax_flash::sm90
