// Walks the order of query tiles of cuda/sm90/forward/schedule.cuh on the host, for the calls on
// stdin, one a line:
//
//   way batch heads tiles paired multiprocessors batch_shift
//
// `way`: 0 for deal(), 1 for take_in_turn(), 2 for set_apart(). Writes a line for each call: how
// often the query tiles are taken, least and most; the least number of tiles that a block takes;
// and the greatest cost of a block over the mean. Tile t costs t + 1 tiles of keys and one more to
// begin.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __host__
#define __forceinline__ inline
struct {
  int x;
} blockIdx;
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
#include "sm90/forward/schedule.cuh"

namespace {

using jax_flash::sm90::QueryTileCursor;
using jax_flash::sm90::QueryTileSchedule;

struct Call {
  int way, batch, heads, tiles, paired, multiprocessors, batch_shift;
};

QueryTileSchedule schedule_of(const Call& call) {
  jax_flash::Shape shape;
  shape.batch = call.batch;
  shape.heads = shape.kv_heads = call.heads;
  QueryTileSchedule schedule(shape, call.tiles, call.paired != 0);
  if (call.way == 0) schedule.deal(call.multiprocessors, 0.6, call.batch_shift);
  if (call.way == 1) schedule.take_in_turn(call.multiprocessors);
  if (call.way == 2) schedule.set_apart(call.multiprocessors, call.batch_shift);
  return schedule;
}

void walk(const Call& call) {
  const QueryTileSchedule schedule = schedule_of(call);
  std::vector<int> taken(static_cast<size_t>(call.batch) * call.heads * call.tiles);
  int64_t greatest = 0, sum = 0, fewest = INT64_MAX;
  int32_t counter = static_cast<int32_t>(schedule.grid());
  for (blockIdx.x = 0; blockIdx.x < schedule.grid(); ++blockIdx.x) {
    int64_t cost = 0, tiles = 0;
    for (QueryTileCursor cursor{schedule, call.batch_shift}; cursor.valid();) {
      const auto q = cursor.index();
      ++taken.at((static_cast<size_t>(q.batch) * call.heads + q.head) * call.tiles + q.tile);
      cost += q.tile + 2;
      ++tiles;
      const int32_t unit = cursor.unit;
      cursor.advance();
      if (call.way == 1 && cursor.unit != unit) cursor.unit = counter++;
    }
    greatest = std::max(greatest, cost);
    fewest = std::min(fewest, tiles);
    sum += cost;
  }
  const auto [least, most] = std::minmax_element(taken.begin(), taken.end());
  const double blocks = std::min<double>(call.multiprocessors, taken.size());
  std::printf("%d %d %d %.4f\n", *least, *most, static_cast<int>(fewest), greatest * blocks / sum);
}

}  // namespace

int main() {
  Call call;
  while (std::scanf("%d %d %d %d %d %d %d", &call.way, &call.batch, &call.heads, &call.tiles,
                    &call.paired, &call.multiprocessors, &call.batch_shift) == 7) {
    walk(call);
  }
}
