// Times Kiln's op and another way to the same result in turn, in one run.
#pragma once
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace kiln::benchmarks {

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

inline double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Medians: GB/s of `bytes` (or GFLOP/s: amount and unit) for `kiln` and `other`, and how many times faster
// kiln is. Needs UseManualTime().
inline void compare(benchmark::State& state, double amount, const std::function<void()>& kiln,
                    const std::function<void()>& other, const std::string& unit = "GB/s") {
  std::vector<double> kiln_seconds, other_seconds;
  kiln();
  other();
  for (auto _ : state) {
    kiln_seconds.push_back(seconds_of(kiln));
    other_seconds.push_back(seconds_of(other));
    state.SetIterationTime(kiln_seconds.back());
  }
  state.counters[unit] = amount / median(kiln_seconds) * 1e-9;
  state.counters["other_" + unit] = amount / median(other_seconds) * 1e-9;
  state.counters["ratio"] = median(other_seconds) / median(kiln_seconds);
}

}  // namespace kiln::benchmarks
