// Uses a Remembered of cuda/plan/remembered.h with four entries, for the pairs of numbers on stdin,
// one a line. Writes a line for each: the sum of the numbers, and 1 if it was computed, 0 if
// remembered.
#include "plan/remembered.h"

#include <cstdint>
#include <cstdio>

int main() {
  jax_flash::Remembered<int64_t, 2, 4> sums;
  long a, b;
  while (std::scanf("%ld %ld", &a, &b) == 2) {
    int computed = 0;
    const auto sum = sums.get({a, b}, [&] {
      computed = 1;
      return int64_t{a} + b;
    });
    std::printf("%ld %d\n", static_cast<long>(sum), computed);
  }
}
