// Chooses how many heads of a backward call run together, if their blocks differ in length. This is
// plain C++, which a test compiles without CUDA (tests/sections.cc).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan/divisor.h"

namespace jax_flash::sm90 {

// Returns when the last block ends if multiprocessors take blocks in order as they become free.
inline int64_t end_of_blocks(const std::vector<int32_t>& costs, int64_t heads, int64_t section,
                             int32_t multiprocessors) {
  // The number of multiprocessors that become free at a time, which is taken modulo the size.
  std::vector<int32_t> ends(*std::max_element(costs.begin(), costs.end()) + 1);
  const auto size = static_cast<int64_t>(ends.size());
  int64_t now = 0, last = 0;
  int32_t idle = multiprocessors;
  for (int64_t first = 0; first < heads; first += section) {
    for (const int32_t cost : costs) {
      for (auto left = static_cast<int32_t>(std::min(section, heads - first)); left > 0;) {
        while (idle == 0) {
          ++now;
          std::swap(idle, ends[now % size]);
        }
        const int32_t taken = std::min(left, idle);
        left -= taken;
        idle -= taken;
        ends[(now + cost) % size] += taken;
        last = std::max(last, now + cost);
      }
    }
  }
  return last;
}

// Chooses how many heads make a section (TileSchedule), at most as many as have three blocks for
// each multiprocessor. Sections are equally long, so that no short one is left over. The choice is
// the one that ends first, where 2% are added for each time that the data of a section's heads
// doubles beyond 20 MB of an L2 of 50 MB (measured: TUNING_backward.md). Calls with so many
// blocks that the last ones hardly matter get one block for each multiprocessor. `head_bytes`: what
// the blocks of a head read and add to.
inline int64_t heads_of_section(const std::vector<int32_t>& costs, int64_t heads,
                                int64_t head_bytes, int32_t multiprocessors) {
  const auto tiles = static_cast<int64_t>(costs.size());
  const auto heads_of = [&](int64_t blocks) {
    return std::clamp<int64_t>(multiprocessors * blocks / tiles, 1, heads);
  };
  if (tiles > 512 || tiles * heads > 64 * multiprocessors) return heads_of(1);
  const int64_t least = ceil_div(heads_of(1), 2);
  int64_t chosen = 0;
  double best = 0.0;
  for (int64_t sections = ceil_div(heads, heads_of(3)), before = 0;; ++sections) {
    const int64_t section = ceil_div(heads, sections);
    if (section < least) return chosen;
    if (section != before) {
      const double of_cache = double(section) * head_bytes / 20e6;
      const double end = end_of_blocks(costs, heads, section, multiprocessors) *
                         (1.0 + 0.02 * std::log2(std::max(of_cache, 1.0)));
      if (chosen == 0 || end < best) chosen = section, best = end;
    }
    before = section;
    if (section == 1) return chosen;
  }
}

}  // namespace jax_flash::sm90
