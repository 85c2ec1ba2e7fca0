#include "plan/price/machine_clock.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "core/aten.h"
#include "core/median.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

// Readings closer together than this are one speed: rescaling by less would add more noise than it removes.
constexpr double kSameSpeed = 0.05;
// The share of the readings that is left out at each end: single interruptions are no change of speed.
constexpr double kLeftOut = 0.1;

double elapsed_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Half of the distance between the slow and the fast readings, as a share of the middle.
double spread_of(std::vector<double> values) {
  const double middle = median(values);
  std::ranges::sort(values);
  const auto left_out = static_cast<size_t>(kLeftOut * static_cast<double>(values.size()));
  return (values[values.size() - 1 - left_out] - values[left_out]) / (2 * middle);
}

std::vector<double> column(const std::vector<MachineClock>& readings, double MachineClock::*member) {
  std::vector<double> values;
  for (const MachineClock& reading : readings) values.push_back(reading.*member);
  return values;
}

double factor(double reference, double now, double spread) {
  if (reference <= 0) return 1;
  const double ratio = now / reference;
  return std::abs(std::log(ratio)) <= std::max(kSameSpeed, spread) ? 1 : ratio;
}

}  // namespace

std::vector<MachineClock> read_clock(at::Device device, double seconds) {
  // A GPU needs larger ones to be busy.
  const int64_t side = device.is_cuda() ? 4096 : 768;
  const int64_t bytes = device.is_cuda() ? 256 << 20 : 16 << 20;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({side, side}, at::TensorOptions().device(device)), b = at::ones_like(a);
  const at::Tensor from = at::zeros({bytes}, at::TensorOptions(at::kByte).device(device));
  at::Tensor product = at::empty_like(a), to = at::zeros_like(from);
  const auto time = [&](auto&& work) {
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    const auto begin = Clock::now();
    work();
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    return elapsed_since(begin);
  };
  const auto read = [&] {
    return MachineClock{.product_s = time([&] { at::mm_out(product, a, b); }),
                        .copy_s = time([&] { to.copy_(from); })};
  };
  read();  // warms up
  std::vector<MachineClock> readings;
  const auto begin = Clock::now();
  do readings.push_back(read());
  while (elapsed_since(begin) < seconds);
  return readings;
}

MachineClock middle_of(const std::vector<MachineClock>& readings) {
  return {.product_s = median(column(readings, &MachineClock::product_s)),
          .copy_s = median(column(readings, &MachineClock::copy_s))};
}

MachineSpeed speed_of(const MachineClock& reference, const std::vector<MachineClock>& readings) {
  const double product_spread = spread_of(column(readings, &MachineClock::product_s)),
               copy_spread = spread_of(column(readings, &MachineClock::copy_s));
  const MachineClock now = middle_of(readings);
  return {.product = factor(reference.product_s, now.product_s, product_spread),
          .copy = factor(reference.copy_s, now.copy_s, copy_spread),
          .spread = std::max(product_spread, copy_spread)};
}

const std::vector<MachineClock>& present_readings(at::Device device) {
  static std::map<std::pair<std::string, int>, std::vector<MachineClock>> known;
  std::vector<MachineClock>& readings = known[{device.str(), at::get_num_threads()}];
  if (readings.empty()) readings = read_clock(device, kClockSeconds);
  return readings;
}

std::string describe(const MachineSpeed& speed) {
  std::string text;
  if (speed.product != 1 || speed.copy != 1)
    text = fmt::format("at present arithmetic takes {:.2f} and memory {:.2f} times as long as when measured",
                       speed.product, speed.copy);
  if (speed.is_steady()) return text;
  return text + fmt::format("{}the machine is not steady: the same work differs by {:.0f} % within a moment",
                            text.empty() ? "" : "; ", 100 * speed.spread);
}

}  // namespace kiln
