// A machine's present speed, compared with the speed when its profile was measured. Processors change their
// clock and share it with other programs.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <string>
#include <vector>

namespace kiln {

// Seconds of two short pieces of work: a product, which is bound by arithmetic, and a copy, which is bound by
// memory.
struct MachineClock {
  double product_s = 0, copy_s = 0;  // 0: not known
  double taken = 0;                  // share of the processors' time that other programs had meanwhile
};

// How much longer work takes than when the profile was measured.
struct MachineSpeed {
  double product = 1, copy = 1;  // factors on the seconds of each kind of work
  double spread = 0;             // by how much readings differ, as a share of the middle
  double reach = 0;              // how much longer or shorter work may take at another moment, as a share
  double taken = 0;              // share of the processors' time that other programs had during the readings
  // A larger spread means that another program runs or that the clock changes.
  static constexpr double kSteadySpread = 0.1;
  bool is_steady() const { return spread <= kSteadySpread; }
};

// Returns the seconds of wall-clock time since `begin`.
double elapsed_since(std::chrono::steady_clock::time_point begin);

// Times both pieces of work in turn until `seconds` have passed. Each reading takes some milliseconds.
std::vector<MachineClock> read_clock(at::Device device, double seconds);
inline constexpr double kClockSeconds = 0.3;
// Returns the median of each over the time of the readings. A slow moment has fewer readings but counts as
// much.
MachineClock middle_of(const std::vector<MachineClock>& readings);

// Compares readings with `reference`. If they differ from it by no more than among themselves, the speed is
// the same. REQUIRES: there are readings.
MachineSpeed speed_of(const MachineClock& reference, const std::vector<MachineClock>& readings);
// Returns readings of the machine's present speed with the threads that the process has. They are taken once
// in a process, and read_again() adds those of another moment.
const std::vector<MachineClock>& present_readings(at::Device device);
const std::vector<MachineClock>& read_again(at::Device device);

// Returns "at present arithmetic takes 1.40 and memory ... times as long ...", how unsteady the machine is
// and how much of it other programs have; "" if there is nothing to say.
std::string describe(const MachineSpeed& speed);

}  // namespace kiln
