// How fast a machine is at the moment, against how fast it was when its profile was measured: processors
// change their clock and share it with other programs.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <string>
#include <vector>

namespace kiln {

// What two short pieces of work take: a product, bound by arithmetic, and a copy, bound by memory.
struct MachineClock {
  double product_s = 0, copy_s = 0;  // 0: not known
};

// How much longer work takes than when the profile was measured.
struct MachineSpeed {
  double product = 1, copy = 1;  // factors on the seconds of each kind of work
  double spread = 0;             // by how much readings differ, as a share of the middle
  double reach = 0;              // how much longer or shorter work may take at another moment, as a share
  // More than this between readings is another program, or a clock that changes.
  static constexpr double kSteadySpread = 0.1;
  bool is_steady() const { return spread <= kSteadySpread; }
};

// Seconds of wall-clock time.
double elapsed_since(std::chrono::steady_clock::time_point begin);

// Times both pieces of work in turn for so long. Each reading takes some milliseconds.
std::vector<MachineClock> read_clock(at::Device device, double seconds);
inline constexpr double kClockSeconds = 0.3;
// Each by its median over the time that was read: a slow moment has fewer readings, and counts as much.
MachineClock middle_of(const std::vector<MachineClock>& readings);

// A reading that differs from `reference` by no more than readings do among themselves is the same speed.
// REQUIRES: there are readings.
MachineSpeed speed_of(const MachineClock& reference, const std::vector<MachineClock>& readings);
// The machine's present speed with the threads that the process has: read once in a process, and whenever
// read_again() is called, which adds a moment to those before.
const std::vector<MachineClock>& present_readings(at::Device device);
const std::vector<MachineClock>& read_again(at::Device device);

// "at present products take 1.4 times as long ...", with what is not steady; "" where nothing is to be said.
std::string describe(const MachineSpeed& speed);

}  // namespace kiln
