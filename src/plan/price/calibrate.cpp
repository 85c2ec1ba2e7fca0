#include "plan/price/calibrate.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>

#include "core/aten.h"
#include "core/error.h"
#include "core/measuring.h"
#include "core/tensors.h"
#include "models/registry.h"
#include "parallel/machine.h"
#include "plan/price/machine_clock.h"
#include "plan/price/machine_profile.h"
#include "plan/price/price.h"
#include "plan/price/step_timing.h"
#include "plan/price/this_machine.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

// A GPU needs more rows to be busy.
constexpr int64_t kGpuBatches = 16;
// fp16 is timed for every second workload only. A CPU merely stores it, and on a GPU it is as fast as bf16.
constexpr size_t kHalfStride = 2;

bool is_within(const RatePoint& small, const RatePoint& large) {
  return small.work <= large.work && small.m <= large.m && small.n <= large.n && small.k <= large.k;
}

// Other programs make single measurements of products and attention too long, never too short. So an
// operation whose shape is part of a larger one gets no more seconds than that one.
void remove_disturbances(std::vector<RatePoint>& points) {
  for (size_t i = points.size(); i-- > 0;)
    for (size_t j = i + 1; j < points.size(); ++j)
      if (is_within(points[i], points[j])) points[i].seconds = std::min(points[i].seconds, points[j].seconds);
}

// Collects timed operations into the points of a profile.
class RateTable {
 public:
  void add(StepTiming timing) {
    for (const OpRecord& op : ops_of(timing.spans)) {
      const double work = op.flops > 0 ? op.flops : op.bytes;
      if (work <= 0) continue;
      // Every shape is a point of its own; bytes are grouped by quarters of an octave.
      const Shape shape =
          op.flops > 0 ? Shape{-1, op.m, op.n, op.k} : Shape{std::llround(4 * std::log2(work))};
      Seen& seen = seen_[rate_key(op.name, op.dtype)][shape];
      seen.work.push_back(work);
      seen.pace.push_back(op.seconds / work);
    }
    if (!timing.spans.empty()) steps_.push_back(std::move(timing));
  }

  std::map<std::string, std::vector<RatePoint>> points() {
    std::map<std::string, std::vector<RatePoint>> rates;
    for (auto& [key, shapes] : seen_) {
      auto& points = rates[key];
      for (auto& [shape, seen] : shapes) {
        const double work = median(seen.work);
        points.push_back({work, work * median(seen.pace), shape[1], shape[2], shape[3]});
      }
      std::ranges::sort(points, {}, &RatePoint::work);
      if (points.back().k > 0) remove_disturbances(points);
    }
    return rates;
  }

  // Fits a factor on all operations to what whole steps take beside `op_overhead_s` (other programs, caches
  // that the operation before has filled): the median of the steps.
  void fit_steps(MachineProfile& profile) const {
    if (steps_.empty()) return;
    std::vector<double> ratios;
    for (const StepTiming& step : steps_) {
      const double overheads = num_ops(step) * profile.op_overhead_s;
      ratios.push_back((step.seconds - overheads) / (price_step(step.spans, profile).seconds - overheads));
    }
    const double share = std::clamp(median(ratios), kLeastShare, kMostShare);
    for (auto& [key, points] : profile.rates)
      for (RatePoint& point : points) point.seconds *= share;
    for (const StepTiming& step : steps_) add_step(profile, step);
  }

 private:
  using Shape = std::array<int64_t, 4>;  // bucket of bytes, m, n, k
  struct Seen {
    std::vector<double> work, pace;  // pace: seconds per work
  };
  static double num_ops(const StepTiming& step) { return static_cast<double>(ops_of(step.spans).size()); }

  static constexpr double kLeastShare = 0.5, kMostShare = 1.5;  // outside this range something else went on

  std::map<std::string, std::map<Shape, Seen>> seen_;
  std::vector<StepTiming> steps_;
};

// Returns the bytes per second of the fastest of some copies from one tensor to another.
double copied_bytes_per_s(const at::Tensor& from, const at::TensorOptions& there) {
  at::Tensor to = at::empty(from.sizes(), there);
  const auto synchronize = [&] {
    for (const at::Tensor& tensor : {from, to})
      if (tensor.is_cuda()) at::accelerator::synchronizeDevice(tensor.get_device());
  };
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 4; ++i) {
    synchronize();
    const auto begin = Clock::now();
    to.copy_(from, /*non_blocking=*/true);
    synchronize();
    best = std::min(best, elapsed_since(begin));
  }
  return static_cast<double>(from.numel()) / best;
}

MachineProfile cpu_profile() {
  MachineProfile profile = estimate_cpu();
  profile.num_processors = at::get_num_threads();
  profile.context_bytes = resident_bytes();
  return profile;
}

// Takes what cannot be measured here (links to other machines, watts, and on a single GPU links to others)
// from the built-in GPU of the nearest name, or else of the nearest memory.
MachineProfile gpu_profile(at::Device device) {
  const std::string machine = machine_name(device);
  const auto memory_bytes = static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).second);
  const std::optional<std::string> kind = builtin_profile_named(machine);
  MachineProfile profile = kind ? find_profile(*kind) : nearest_in_memory(memory_bytes);
  if (!kind)
    fmt::print(stderr,
               "note: {} is not built in: its links to others and its watts are taken to be those of {}\n",
               machine, profile.name);
  profile.name = profile.machine = machine;
  profile.memory_bytes = memory_bytes;
  constexpr int64_t kBytes = 512 << 20;
  const at::TensorOptions bytes(at::kByte);
  const at::Tensor here = at::zeros({kBytes}, bytes.device(device));
  profile.memory_bytes_per_s = 2 * copied_bytes_per_s(here, here.options());  // read and written
  profile.host_link_bytes_per_s =
      copied_bytes_per_s(at::zeros({kBytes}, bytes.pinned_memory(true)), here.options());
  if (num_devices(device) > 1) {
    const at::Tensor first = at::zeros({kBytes}, bytes.device(at::Device(at::kCUDA, 0)));
    profile.peer_bytes_per_s = copied_bytes_per_s(first, bytes.device(at::Device(at::kCUDA, 1)));
  }
  return profile;
}

// Measures each disk once, the one that is written to first: it also says how fast data on it are read.
void measure_disks(MachineProfile& profile, const CalibratedFolders& folders) {
  std::filesystem::create_directories(profiles_folder());
  const auto measure = [&](const std::string& folder, bool may_write) {
    if (folder.empty() || disk_of(profile.disks, folder)) return;
    const DiskSpeed disk = measure_disk(folder, may_write);
    if (disk.read_bytes_per_s > 0)
      profile.disks.push_back(disk);
    else
      fmt::print(stderr, "note: {} holds too little to measure how fast its disk is\n", folder);
  };
  measure(folders.offloaded, /*may_write=*/true);
  measure(folders.data, /*may_write=*/false);
  measure(profiles_folder(), /*may_write=*/true);
  for (const std::string& folder : {profiles_folder(), folders.data})
    profile = with_disks_of(std::move(profile), folder, "");
}

// Returns the first workload of every family, then the second of each. What matters most comes first, in case
// time runs out.
std::vector<TrainOptions> kinds_of_steps(const MachineProfile& profile, at::Device device) {
  size_t most = 0;
  for (const Family& family : denoiser_families()) most = std::max(most, family.calibration.size());
  std::vector<TrainOptions> kinds;
  for (size_t i = 0; i < most; ++i) {
    for (const Family& family : denoiser_families()) {
      if (i >= family.calibration.size()) continue;
      for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kHalf}) {
        if (dtype == at::kHalf && i % kHalfStride != 0) continue;
        if (profile.peak_flops.contains(dtype == at::kBFloat16 ? at::kBFloat16 : at::kFloat))
          kinds.push_back(calibration_step(family, family.calibration[i], dtype, device));
      }
    }
    if (i > 0) continue;
    // Adds every other optimizer, because each has kernels of its own for the update.
    TrainOptions other = kinds.front();
    for (const std::string& name : optimizer_names())
      if (const std::string usual = kinds.front().optimizer.name; name != usual) {
        other.optimizer.name = name;
        kinds.push_back(other);
      }
  }
  return kinds;
}

// Returns the seconds between two operations (views, autograd, allocation), of a model so small that they are
// a large part of its step: in other steps the clock's disturbances are larger than they are.
double measure_overhead(at::Device device) {
  const Family& family = denoiser_families().front();
  TrainOptions options = calibration_step(family, family.calibration.front(), at::kFloat, device);
  options.model.hidden_size = 64;
  options.model.num_heads = 2;
  options.model.depth = 12;
  options.data.image_size = 64;
  options.global_batch = options.micro_batch = 1;
  const StepTiming timing = time_steps(options, device, {.plain = 40, .watched = 10});
  double in_ops = 0, count = 0;
  for (const OpRecord& op : ops_of(timing.spans)) in_ops += op.seconds, ++count;
  return std::max(0.0, timing.least_seconds - in_ops) / count;
}

// Measures all kinds in turn, twice. That averages over what else goes on for a while and over how fast
// memory is meanwhile.
void measure_steps(MachineProfile& profile, at::Device device, double seconds) {
  constexpr int kRounds = 2;
  const auto begin = Clock::now();
  const std::vector<TrainOptions> kinds = kinds_of_steps(profile, device);
  RateTable table;
  std::vector<MachineClock> readings;
  for (size_t done = 0; done < kRounds * kinds.size() && elapsed_since(begin) < seconds; ++done) {
    std::ranges::copy(read_clock(device, kClockSeconds / 10), std::back_inserter(readings));
    table.add(time_steps(kinds[done % kinds.size()], device, {.plain = 1, .watched = 1}));
    fmt::print(stderr, "\r{} of {} steps measured, {:.0f} s ", done + 1, kRounds * kinds.size(),
               elapsed_since(begin));
  }
  fmt::print(stderr, "\n");
  if (!readings.empty()) profile.clock = middle_of(readings);
  profile.operations = {};
  profile.rates = table.points();
  profile.op_overhead_s = measure_overhead(device) / profile.speed.product;
  table.fit_steps(profile);
}

}  // namespace

TrainOptions calibration_step(const Family& family, const CalibrationWorkload& workload, at::ScalarType dtype,
                              at::Device device) {
  const int64_t times = device.is_cuda() ? kGpuBatches : 1;
  TrainOptions options;
  options.model.name = family.name;
  options.model.config = workload.config;
  if (const PublishedObjective* published = row_of(family.objectives, family.name))
    options.objective.name = nlohmann::json::parse(published->options).at("objective").get<std::string>();
  options.model.hidden_size = workload.hidden_size;
  options.model.num_heads = workload.num_heads;
  options.model.depth = workload.depth;
  options.model.patch_size = workload.patch_size;
  options.data.image_size = workload.image_size;
  options.global_batch = workload.batch * times;
  options.micro_batch = workload.micro_batch * times;
  options.compute.dtype = dtype;
  return options;
}

MachineProfile calibrate(at::Device device, double seconds, const CalibratedFolders& folders) {
  apply({.device = device});
  MachineProfile profile = device.is_cuda() ? gpu_profile(device) : cpu_profile();
  const auto now = std::chrono::system_clock::now();
  profile.machine = machine_name(device);
  profile.source = fmt::format("measured on {}, {:%Y-%m-%d}", profile.machine, fmt::gmtime(now));
  profile.measured = true;
  std::map<at::ScalarType, double> measured;  // a CPU may multiply several dtypes as one
  for (auto& [dtype, flops] : profile.peak_flops) {
    double& once = measured[device.is_cpu() ? cpu_product_dtype(dtype) : dtype];
    if (once == 0) once = measure_peak_flops(device, dtype);
    flops = once;
  }
  measure_disks(profile, folders);
  profile.decoding = measure_decoding();
  if (device.is_cpu()) {
    const RankLinks links = measure_rank_links();
    profile.rank_hop_s = links.hop_s;
    profile.peer_bytes_per_s = links.bytes_per_s;
  }
  measure_steps(profile, device, seconds);
  return profile;
}

}  // namespace kiln
