#include "plan/price/price.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace kiln {

namespace {

// cuBLAS cuts products into tiles of about this size. A wave is one tile on every multiprocessor, and the
// last wave takes as long as a full one. If tiles are few, k is split, down to this length.
constexpr double kTile = 128, kMinSplitK = 512, kMaxSplits = 16;

// Returns the time of a product as a multiple of what the peak alone would take.
double wave_factor(const OpRecord& op, int64_t num_processors) {
  if (num_processors <= 0 || op.flops <= 0) return 1;
  const auto processors = static_cast<double>(num_processors);
  const double m = static_cast<double>(op.m), n = static_cast<double>(op.n), k = static_cast<double>(op.k);
  const double tiles = std::ceil(m / kTile) * std::ceil(n / kTile);
  double waves = std::ceil(tiles / processors);
  const auto most_splits = static_cast<int64_t>(std::min(kMaxSplits, k / kMinSplitK));
  for (int64_t i = 2; i <= most_splits; ++i) {
    const auto splits = static_cast<double>(i);
    waves = std::min(waves, std::ceil(tiles * splits / processors) / splits);
  }
  return waves * processors * kTile * kTile / (m * n);
}

// Returns the same for fused attention, which spreads heads and blocks of queries over the processors.
double attention_factor(const OpRecord& op, int64_t num_processors) {
  if (num_processors <= 0 || op.flops <= 0) return 1;
  const auto processors = static_cast<double>(num_processors);
  const double blocks = static_cast<double>(op.m) * std::ceil(static_cast<double>(op.n) / kTile);
  const double rows = static_cast<double>(op.n) / (std::ceil(static_cast<double>(op.n) / kTile) * kTile);
  return std::ceil(blocks / processors) * processors / (blocks * rows);
}

// Returns the dtype in which the machine multiplies the operands: fp8 that it lacks is emulated in bf16.
at::ScalarType multiplied_in(const OpRecord& op, const MachineProfile& machine) {
  const bool is_emulated = op.dtype == at::kFloat8_e4m3fn && !machine.peak_flops.contains(op.dtype);
  return is_emulated ? at::kBFloat16 : op.dtype;
}

// Assumption: kernels that sum over rows or columns reach this share of the rate at which others move their
// bytes (norms and their gradients: 1.3 of 1.7 TB/s on an A100).
constexpr double kSumShare = 0.76;
// Assumption: the same share for an epilogue, whose arithmetic and traffic no products of its own tile hide.
constexpr double kEpilogueShare = 0.5;

// Assumption, until a GPU has run it: the fastest of the algorithms that are timed takes this share of the
// time of the one that cuBLASLt would choose (660 instead of 620 TFLOP/s on an H200).
constexpr double kTimedShare = 0.93;

// Returns the bytes that a product reads and writes besides its operands and its result. They are an
// epilogue's, such as those that gelu reads.
double epilogue_bytes(const OpRecord& op) {
  if (op.op_class != OpClass::kMatmul) return 0;
  const double m = static_cast<double>(op.m), n = static_cast<double>(op.n), k = static_cast<double>(op.k);
  const double operands = (m * k + n * k + m * n) * static_cast<double>(c10::elementSize(op.dtype));
  return std::max(0.0, op.bytes - operands);
}

double by_figures(const OpRecord& op, const MachineProfile& machine) {
  const double bytes_per_s = machine.memory_bytes_per_s * machine.bandwidth_efficiency;
  const double epilogue = epilogue_bytes(op);
  const bool is_sum = op.op_class == OpClass::kElementwise && op.k > 0;
  double seconds = (op.bytes - epilogue) / (bytes_per_s * (is_sum ? kSumShare : 1));
  if (op.flops > 0) {
    check_dtype(machine, multiplied_in(op, machine));
    const bool is_attention = op.op_class == OpClass::kAttention;
    const double share = is_attention ? machine.attention_efficiency : machine.matmul_efficiency;
    const double factor =
        is_attention ? attention_factor(op, machine.num_processors) : wave_factor(op, machine.num_processors);
    seconds =
        std::max(seconds, op.flops * factor / (machine.peak_flops.at(multiplied_in(op, machine)) * share));
  }
  return seconds + epilogue / (bytes_per_s * kEpilogueShare);
}

// Interpolates between the two neighbours in work, on logarithmic axes. Beyond an end, its rate holds.
double along_work(const std::vector<RatePoint>& points, double work) {
  const auto above = std::ranges::lower_bound(points, work, {}, &RatePoint::work);
  if (above == points.end()) return points.back().seconds * work / points.back().work;
  if (above == points.begin()) return above->seconds * std::min(1.0, work / above->work);
  const RatePoint &low = *(above - 1), &high = *above;
  const double share = std::log(work / low.work) / std::log(high.work / low.work);
  return low.seconds * std::pow(high.seconds / low.seconds, share);
}

// Returns what the arithmetic and traffic of a product or an attention would take alone. Its real time grows
// with its shape in the same way, up to a factor that changes little from one shape to the next.
double ideal_seconds(const RatePoint& shape, const OpRecord& op, const MachineProfile& machine) {
  const double m = static_cast<double>(shape.m), n = static_cast<double>(shape.n),
               k = static_cast<double>(shape.k);
  const double elements = op.op_class == OpClass::kAttention ? 4 * m * n * k : m * k + n * k + m * n;
  return shape.work / machine.peak_flops.at(multiplied_in(op, machine)) +
         elements * static_cast<double>(c10::elementSize(op.dtype)) / machine.memory_bytes_per_s;
}

// Returns how far apart two extents are. A short one costs efficiency; among long ones little changes.
double squared_distance(int64_t a, int64_t b) {
  constexpr double kShort = 256, kOctave = 0.2;
  const double x = static_cast<double>(std::max<int64_t>(1, a)),
               y = static_cast<double>(std::max<int64_t>(1, b));
  const double filling = std::log2((1 + kShort / x) / (1 + kShort / y)), octaves = kOctave * std::log2(x / y);
  return filling * filling + octaves * octaves;
}

// Prices products and attention: the ideal time, times the factor of the measured shapes weighted by how near
// they are (inverse fourth power of the distance).
double among_shapes(const std::vector<RatePoint>& points, const OpRecord& op, const MachineProfile& machine) {
  check_dtype(machine, multiplied_in(op, machine));
  double weights = 0, log_factor = 0;
  for (const RatePoint& p : points) {
    const double squared =
        squared_distance(op.m, p.m) + squared_distance(op.n, p.n) + squared_distance(op.k, p.k);
    const double weight = 1 / (squared * squared + 1e-6);
    weights += weight;
    log_factor += weight * std::log(p.seconds / ideal_seconds(p, op, machine));
  }
  const RatePoint shape{.work = op.flops, .m = op.m, .n = op.n, .k = op.k};
  return ideal_seconds(shape, op, machine) * std::exp(log_factor / weights);
}

// Returns a measured operation of the same class that stands in for one that was never seen.
const char* stand_in(OpClass op_class) {
  switch (op_class) {
    case OpClass::kMatmul:
    case OpClass::kConvolution:
      return "kiln::affine";
    case OpClass::kAttention:
      return "kiln::packed_attention";
    case OpClass::kElementwise:
      return "aten::mul";
  }
  return "";
}

const std::vector<RatePoint>* measured_points(const OpRecord& op, const MachineProfile& machine) {
  if (machine.rates.empty()) return nullptr;
  for (const std::string& name : {op.name, std::string(stand_in(op.op_class))})
    if (const auto entry = machine.rates.find(rate_key(name, op.dtype));
        entry != machine.rates.end() && !entry->second.empty())
      return &entry->second;
  return nullptr;
}

// Returns how far the price of an operation may be off, in a step whose others are off likewise. It depends
// on whether its shape was measured, only other shapes of it were, or another operation stands in for it.
double price_error(const OpRecord& op, const MachineProfile& machine) {
  constexpr double kOfShape = 0.1, kOfOperation = 0.4, kOfStandIn = 1;
  if (machine.operations.seconds(op)) return kOfShape;
  return machine.rates.contains(rate_key(op.name, op.dtype)) ? kOfOperation : kOfStandIn;
}

}  // namespace

double price(const OpRecord& op, const MachineProfile& machine) {
  const double overhead = machine.op_overhead_s * machine.speed.product;
  const double work = op.flops > 0 ? op.flops : op.bytes;
  if (work <= 0) return overhead;
  const double factor = op.flops > 0 ? machine.speed.product : machine.speed.copy;
  if (const std::optional<double> seconds = machine.operations.seconds(op))
    return factor * *seconds + overhead;
  const auto* points = measured_points(op, machine);
  const double seconds = !points        ? by_figures(op, machine)
                         : op.flops > 0 ? among_shapes(*points, op, machine)
                                        : along_work(*points, work);
  return factor * seconds + overhead;
}

double price(const OpRecord& op, const MachineProfile& machine, const ComputeOptions& compute) {
  const bool has_epilogues = op.dtype == at::kBFloat16 || op.dtype == at::kHalf;
  const bool is_timed = compute.untried_gpu.has(Untried::kProducts) && has_epilogues &&
                        op.op_class == OpClass::kMatmul && op.name.starts_with("kiln::affine");
  return price(op, machine) * (is_timed ? kTimedShare : 1);
}

StepPrice price_step(const std::vector<Span>& spans, const MachineProfile& machine) {
  StepPrice total;
  for (const Span& span : spans)
    for (const OpRecord& op : span.ops) {
      const double seconds = static_cast<double>(span.times) * price(op, machine);
      total.seconds += seconds;
      total.by_phase[static_cast<size_t>(span.phase)] += seconds;
    }
  return total;
}

double measured_share(const std::vector<Span>& spans, const MachineProfile& machine) {
  if (machine.operations.empty()) return 0;
  double measured = 0, all = 0;
  for (const Span& span : spans)
    for (const OpRecord& op : span.ops) {
      const double seconds = static_cast<double>(span.times) * price(op, machine);
      all += seconds;
      if (machine.operations.seconds(op)) measured += seconds;
    }
  return all > 0 ? measured / all : 0;
}

double time_error(const std::vector<Span>& spans, const MachineProfile& machine) {
  if (!machine.measured) return 0;
  double seconds = 0, error = 0;
  for (const Span& span : spans)
    for (const OpRecord& op : span.ops) {
      const double of_op = static_cast<double>(span.times) * price(op, machine);
      seconds += of_op;
      error += of_op * price_error(op, machine);
    }
  return (seconds > 0 ? error / seconds : 0) + (machine.speed.is_steady() ? 0 : machine.speed.reach);
}

}  // namespace kiln
