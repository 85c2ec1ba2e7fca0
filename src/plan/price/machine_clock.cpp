#include "plan/price/machine_clock.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "core/aten.h"
#include "parallel/cpu_share.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

// Speeds closer together than this count as the same: rescaling by less would add more noise than it removes.
constexpr double kSameSpeed = 0.05;
// The share of the time that is left out at each end. If there are enough readings, the longest one is left
// out first, because a single interruption, however long, is no change of speed.
constexpr double kLeftOut = 0.1;
constexpr size_t kEnoughReadings = 8;

// The seconds of pieces of work, by their share of the time of all readings.
class Distribution {
 public:
  explicit Distribution(std::vector<double> seconds) : seconds_(std::move(seconds)) {
    std::ranges::sort(seconds_);
    if (seconds_.size() >= kEnoughReadings) seconds_.pop_back();
    for (const double s : seconds_) total_ += s;
  }
  double at(double share) const {
    double before = 0;
    for (const double s : seconds_)
      if ((before += s) >= share * total_) return s;
    return seconds_.back();
  }
  double middle() const { return at(0.5); }
  double fast() const { return at(kLeftOut); }
  double slow() const { return at(1 - kLeftOut); }
  // Half of the distance between the slow and the fast readings, as a share of the middle.
  double spread() const { return (slow() - fast()) / (2 * middle()); }
  double reach() const { return std::max(slow() / middle(), middle() / fast()) - 1; }

 private:
  std::vector<double> seconds_;
  double total_ = 0;
};

Distribution distribution(const std::vector<MachineClock>& readings, double MachineClock::*member) {
  std::vector<double> values;
  values.reserve(readings.size());
  for (const MachineClock& reading : readings) values.push_back(reading.*member);
  return Distribution(std::move(values));
}

double factor(double reference, double now, double spread) {
  if (reference <= 0) return 1;
  const double ratio = now / reference;
  return std::abs(std::log(ratio)) <= std::max(kSameSpeed, spread) ? 1 : ratio;
}

}  // namespace

double elapsed_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

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
  const ProcessorTimes before = processor_times();
  const auto begin = Clock::now();
  do readings.push_back(read());
  while (elapsed_since(begin) < seconds);
  // A GPU computes whatever its host's processors do.
  const double taken =
      device.is_cpu() ? taken_share(processor_times().since(before), processors_of(at::get_num_threads()))
                      : 0;
  for (MachineClock& reading : readings) reading.taken = taken;
  return readings;
}

MachineClock middle_of(const std::vector<MachineClock>& readings) {
  return {.product_s = distribution(readings, &MachineClock::product_s).middle(),
          .copy_s = distribution(readings, &MachineClock::copy_s).middle()};
}

MachineSpeed speed_of(const MachineClock& reference, const std::vector<MachineClock>& readings) {
  const Distribution products = distribution(readings, &MachineClock::product_s),
                     copies = distribution(readings, &MachineClock::copy_s);
  double taken = 0;
  for (const MachineClock& reading : readings) taken += reading.taken;
  return {.product = factor(reference.product_s, products.middle(), products.spread()),
          .copy = factor(reference.copy_s, copies.middle(), copies.spread()),
          .spread = std::max(products.spread(), copies.spread()),
          .reach = std::max(products.reach(), copies.reach()),
          .taken = taken / static_cast<double>(readings.size())};
}

namespace {

std::vector<MachineClock>& known_readings(at::Device device) {
  static std::map<std::pair<std::string, int>, std::vector<MachineClock>> known;
  return known[{device.str(), at::get_num_threads()}];
}

}  // namespace

const std::vector<MachineClock>& present_readings(at::Device device) {
  const std::vector<MachineClock>& readings = known_readings(device);
  return readings.empty() ? read_again(device) : readings;
}

const std::vector<MachineClock>& read_again(at::Device device) {
  std::vector<MachineClock>& readings = known_readings(device);
  std::ranges::copy(read_clock(device, kClockSeconds), std::back_inserter(readings));
  return readings;
}

std::string describe(const MachineSpeed& speed) {
  std::vector<std::string> parts;
  if (speed.product != 1 || speed.copy != 1)
    parts.push_back(
        fmt::format("at present arithmetic takes {:.2f} and memory {:.2f} times as long as when measured",
                    speed.product, speed.copy));
  if (!speed.is_steady())
    parts.push_back(
        fmt::format("the machine is not steady: the same work takes up to {:.1f} times as long at one moment "
                    "as at another",
                    1 + speed.reach));
  if (const std::string taken = taken_text(speed.taken); !taken.empty())
    parts.push_back(taken + " during this measurement, and steps take less without them");
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace kiln
