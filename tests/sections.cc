// Runs heads_of_section() of cuda/sm90/backward/sections.h for the calls on stdin, one a line:
//
//   tiles rows heads head_bytes multiprocessors
//
// A head has `tiles` causal blocks of keys, which meet from `tiles` to one times `rows` query rows.
// Writes a line for each call: the number of heads, and when the last block ends over the mean.
#include "sm90/backward/sections.h"

#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  int tiles, rows, heads, multiprocessors;
  double head_bytes;
  while (std::scanf("%d %d %d %lf %d", &tiles, &rows, &heads, &head_bytes, &multiprocessors) == 5) {
    std::vector<int32_t> costs;
    for (int tile = tiles; tile > 0; --tile) costs.push_back(tile * rows / 64 + 3);
    const int64_t section = jax_flash::sm90::heads_of_section(
        costs, heads, static_cast<int64_t>(head_bytes), multiprocessors);
    const double mean = std::accumulate(costs.begin(), costs.end(), 0.0) * heads / multiprocessors;
    std::printf("%d %.4f\n", static_cast<int>(section),
                jax_flash::sm90::end_of_blocks(costs, heads, section, multiprocessors) / mean);
  }
}
