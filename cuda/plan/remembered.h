// Remembers what the host has computed for a call's sizes, so that the next call of the same sizes
// need not wait for it. For functions that take microseconds: a call takes 20 or more of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace jax_flash {

// Remembers kEntries results of a function of kNumbers numbers. A result is replaced by that of
// other numbers with the same hash. Threads may share an object.
template <typename Result, std::size_t kNumbers, std::size_t kEntries = 64>
class Remembered {
 public:
  using Numbers = std::array<int64_t, kNumbers>;

  // Returns compute(), or its result when it was last called for these numbers.
  template <typename Compute>
  Result get(const Numbers& numbers, Compute compute) {
    Entry& entry = entries_[hash(numbers) % kEntries];
    {
      const std::lock_guard lock(mutex_);
      if (entry.used && entry.numbers == numbers) return entry.result;
    }
    const Result result = compute();
    const std::lock_guard lock(mutex_);
    entry = {true, numbers, result};
    return result;
  }

 private:
  struct Entry {
    bool used = false;
    Numbers numbers;
    Result result;
  };

  // FNV-1a of 64 bits at a time, with the high bits mixed in.
  static uint64_t hash(const Numbers& numbers) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const int64_t number : numbers) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3;
    }
    return hash ^ hash >> 32;
  }

  std::mutex mutex_;
  std::array<Entry, kEntries> entries_;
};

}  // namespace jax_flash
