#include "plan/price.h"

#include <algorithm>
#include <cmath>

namespace kiln {

namespace {

// cuBLAS cuts products into tiles of about this size; a wave is one tile on every multiprocessor, and the
// last wave takes as long as a full one. Where tiles are few, k is split, down to this length.
constexpr double kTile = 128, kMinSplitK = 512, kMaxSplits = 16;

// The time of a product as a multiple of what the peak alone would take.
double wave_factor(const OpRecord& op, int64_t num_processors) {
  if (num_processors <= 0 || op.flops <= 0) return 1;
  const auto processors = static_cast<double>(num_processors);
  const double m = static_cast<double>(op.m), n = static_cast<double>(op.n), k = static_cast<double>(op.k);
  const double tiles = std::ceil(m / kTile) * std::ceil(n / kTile);
  double waves = std::ceil(tiles / processors);
  for (double splits = 2; splits <= std::min(kMaxSplits, k / kMinSplitK); ++splits)
    waves = std::min(waves, std::ceil(tiles * splits / processors) / splits);
  return waves * processors * kTile * kTile / (m * n);
}

// Heads and blocks of queries are what fused attention spreads over the processors.
double attention_factor(const OpRecord& op, int64_t num_processors) {
  if (num_processors <= 0 || op.flops <= 0) return 1;
  const auto processors = static_cast<double>(num_processors);
  const double blocks = static_cast<double>(op.m) * std::ceil(static_cast<double>(op.n) / kTile);
  const double rows = static_cast<double>(op.n) / (std::ceil(static_cast<double>(op.n) / kTile) * kTile);
  return std::ceil(blocks / processors) * processors / (blocks * rows);
}

double by_figures(const OpRecord& op, const MachineProfile& machine) {
  double seconds = op.bytes / (machine.memory_bytes_per_s * machine.bandwidth_efficiency);
  if (op.flops > 0) {
    check_dtype(machine, op.dtype);
    const bool is_attention = op.op_class == OpClass::kAttention;
    const double share = is_attention ? machine.attention_efficiency : machine.matmul_efficiency;
    const double factor =
        is_attention ? attention_factor(op, machine.num_processors) : wave_factor(op, machine.num_processors);
    seconds = std::max(seconds, op.flops * factor / (machine.peak_flops.at(op.dtype) * share));
  }
  return seconds;
}

// Between the two neighbours in work, on logarithmic axes; beyond the ends at the end's rate.
double along_work(const std::vector<RatePoint>& points, double work) {
  const auto above = std::ranges::lower_bound(points, work, {}, &RatePoint::work);
  if (above == points.end()) return points.back().seconds * work / points.back().work;
  if (above == points.begin()) return above->seconds * std::min(1.0, work / above->work);
  const RatePoint &low = *(above - 1), &high = *above;
  const double share = std::log(work / low.work) / std::log(high.work / low.work);
  return low.seconds * std::pow(high.seconds / low.seconds, share);
}

double log_ratio(int64_t a, int64_t b) {
  return std::log2(static_cast<double>(std::max<int64_t>(1, a)) /
                   static_cast<double>(std::max<int64_t>(1, b)));
}

// Products and attention: seconds per FLOP of the measured shapes, weighted by how near they are (inverse
// distance, each extent in octaves).
double among_shapes(const std::vector<RatePoint>& points, const OpRecord& op) {
  double weights = 0, log_pace = 0;
  for (const RatePoint& p : points) {
    const double m = log_ratio(op.m, p.m), n = log_ratio(op.n, p.n), k = log_ratio(op.k, p.k);
    const double squared = m * m + n * n + k * k;
    const double weight = 1 / (squared * squared + 1e-4);
    weights += weight;
    log_pace += weight * std::log(p.seconds / p.work);
  }
  return op.flops * std::exp(log_pace / weights);
}

// A measured operation of the same class and dtype that stands in for one that was never seen.
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
  for (const std::string& name : {op.name, std::string(stand_in(op.op_class))})
    if (const auto entry = machine.rates.find(rate_key(name, op.dtype));
        entry != machine.rates.end() && !entry->second.empty())
      return &entry->second;
  return nullptr;
}

}  // namespace

double price(const OpRecord& op, const MachineProfile& machine) {
  const double work = op.flops > 0 ? op.flops : op.bytes;
  if (work <= 0) return machine.op_overhead_s;
  const auto* points = measured_points(op, machine);
  const double seconds = !points        ? by_figures(op, machine)
                         : op.flops > 0 ? among_shapes(*points, op)
                                        : along_work(*points, work);
  return seconds + machine.op_overhead_s;
}

StepPrice price_step(const std::vector<OpRecord>& ops, const MachineProfile& machine) {
  StepPrice total;
  for (const OpRecord& op : ops) {
    const double seconds = price(op, machine);
    total.seconds += seconds;
    total.by_phase[static_cast<size_t>(op.phase)] += seconds;
    total.by_class[static_cast<size_t>(op.op_class)] += seconds;
    total.flops += op.flops;
  }
  return total;
}

}  // namespace kiln
