// Defines the modifiers of logits as bits. They name the modifiers of a call and those that a
// kernel supports. The band (causal order, window, lengths, offset) is no modifier.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

enum Modifier : uint32_t {
  kNoModifier = 0,
  kBias = 1,
  kSoftCap = 2,
  kMask = 4,
  kSegments = 8,
  kDropout = 16,
  kAnyScale = 32,  // including zero and negative scales
  kDistance = 64,  // ALiBi slopes or a relative bias
  kEveryModifier = 127,
};

// Returns whether the only modifier is an operand of [N,T,S], which batches and heads may share.
constexpr bool is_matrix(uint32_t modifiers) { return modifiers == kBias || modifiers == kMask; }

// Returns the modifiers that a call asks for.
inline uint32_t modifiers_of(const Forward& params) {
  const Options& options = params.options;
  uint32_t modifiers = kNoModifier;
  if (params.bias) modifiers |= kBias;
  if (params.alibi_slopes || params.relative_bias) modifiers |= kDistance;
  if (options.logits_soft_cap > 0.0f) modifiers |= kSoftCap;
  if (params.mask) modifiers |= kMask;
  if (params.query_segment_ids) modifiers |= kSegments;
  if (options.dropout_threshold != 0) modifiers |= kDropout;
  if (!(options.scale > 0.0f)) modifiers |= kAnyScale;
  return modifiers;
}

// Returns whether the call has a mask of keys: one that all queries of a head share, such as that
// of a padded batch.
inline bool has_key_mask(const Forward& params) { return params.mask && params.mask.row == 0; }

// Returns whether all queries that a block of keys meets share its part of the mask: those of all
// query heads of a key/value head.
inline bool key_block_has_one_mask(const Forward& params) {
  return has_key_mask(params) &&
         (params.mask.head == 0 || params.shape.heads == params.shape.kv_heads);
}

// Returns whether a mask of keys is the call's only modifier.
inline bool has_key_mask_alone(const Forward& params) {
  return modifiers_of(params) == kMask && has_key_mask(params);
}

// Returns the modifiers of a call after its mask has become segments (plan/segment_spans.h), or
// kNoModifier if it cannot: all heads must share it, and there must be no segments.
inline uint32_t modifiers_with_segments(const Forward& params) {
  const uint32_t modifiers = modifiers_of(params);
  if (!has_key_mask(params) || params.mask.head != 0 || (modifiers & kSegments)) return kNoModifier;
  return (modifiers & ~uint32_t{kMask}) | kSegments;
}

}  // namespace jax_flash
