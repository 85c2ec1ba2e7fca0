// The step on one GPU by kinds of operations, priced from the operations of the real step.
#include <fmt/format.h>

#include <array>
#include <list>
#include <numeric>

#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"
#include "plan/price/attention_engine.h"
#include "plan/price/price.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "plan/trace/trace.h"

namespace kiln {

namespace {

// The rows, in order.
constexpr std::array<const char*, 11> kStepRows = {"products",
                                                   "attention, its gradients packed",
                                                   "adaLN and gates, forward",
                                                   "adaLN and gates, backward",
                                                   "GELU apart from products",
                                                   "convolutions, group norms",
                                                   "products of one row a picture (adaLN's modulation)",
                                                   "update: optimizer, averages, cast",
                                                   "norm of the gradients",
                                                   "all else: embedding, loss, copies",
                                                   "encoding, transfers"};
enum StepRow {
  kRowProducts,
  kRowAttention,
  kRowForwardRows,
  kRowBackwardRows,
  kRowGelu,
  kRowConvolutions,
  kRowFewRows,
  kRowUpdate,
  kRowNorm,
  kRowElse,
  kRowTransfers
};

StepRow row_of(const Span& span, const OpRecord& op, int64_t pictures) {
  const auto has = [&](const char* part) { return op.name.find(part) != std::string::npos; };
  if (span.phase == StepPhase::kOptimizer) return kRowUpdate;
  if (span.phase == StepPhase::kGradNorm) return kRowNorm;
  if (op.op_class == OpClass::kAttention || has("pack_heads")) return kRowAttention;
  if (op.op_class == OpClass::kMatmul) {
    const int64_t rows = has("grad_weight") ? op.k : op.m;
    return rows <= pictures ? kRowFewRows : kRowProducts;
  }
  if (op.op_class == OpClass::kConvolution || has("group_norm")) return kRowConvolutions;
  if (has("gelu")) return kRowGelu;
  if (has("adaln") || has("gated_residual") || has("layer_norm"))
    return has("backward") ? kRowBackwardRows : kRowForwardRows;
  return kRowElse;
}

struct StepColumn {
  Plan plan;
  double share_of_peak = 0;
  std::array<double, kStepRows.size()> seconds{};
  std::array<int64_t, kStepRows.size()> number{};  // of operations
};

StepColumn column_of(PlanOptions options, const std::string& untried) {
  options.train.compute.untried_gpu = UntriedGpu::parse(untried);
  const MachineProfile machine = planned_machine(options);
  check_plan(options, machine);
  StepColumn column;
  std::list<StepTrace> traces;  // the last one is that of the step's time
  column.plan = plan_traced(
      options, machine, read_data_outlook(options), [&](const DataShape& shape) -> const StepTrace& {
        return traces.emplace_back(trace_step(traced_options(options.train, machine), shape, machine.device));
      });
  const StepTrace& trace = traces.back();
  for (const Span& span : trace.spans)
    for (const OpRecord& op : span.ops) {
      if (span.phase == StepPhase::kOffload) continue;
      const StepRow row = row_of(span, op, rows_of_walk(options.train, /*world_size=*/1));
      column.seconds[row] += static_cast<double>(span.times) * price(op, machine, options.train.compute);
      column.number[row] += span.times;
    }
  column.seconds[kRowUpdate] = column.plan.phase_s[static_cast<size_t>(StepPhase::kOptimizer)];
  column.seconds[kRowTransfers] =
      column.plan.step_s - std::accumulate(column.seconds.begin(), column.seconds.end(), 0.0);
  column.share_of_peak = trace.flops_per_image * column.plan.images_per_s /
                         machine.peak_flops.at(options.train.compute.product_dtype());
  return column;
}

}  // namespace

std::string gpu_step_table(const TableOptions& table) {
  PlanOptions options = table.plan;
  options.gpus = 1;
  if (!table.has("gpu")) options.gpu = "H200";
  if (!table.has("model")) options.train.model.name = "DiT-XL/2";
  if (!table.has("global-batch")) options.train.global_batch = 32;
  const MachineProfile machine = planned_machine(options);
  if (machine.device != DryRunDevice::kCuda)
    fail("plan", "--table gpu-step is about a GPU, got --gpu {}: name another one", machine.name);
  const std::array<StepColumn, 2> columns = {column_of(options, "none"), column_of(options, "all")};
  std::string text = fmt::format(
      "{} at {} px, {} images a step, {}, {} ({}):\n\n| operations | number | ms | ms with "
      "`--untried-gpu` |\n|---|---|---|---|\n",
      options.train.model.name, options.train.data.image_size, options.train.global_batch,
      choice_name(options.train.compute.dtype), machine.name, machine.source);
  const auto row = [&](const char* name, const std::string& number, const auto& cell) {
    text += fmt::format("| {} | {} | {} | {} |\n", name, number, cell(columns[0]), cell(columns[1]));
  };
  constexpr double kShown = 0.05e-3;  // seconds: what is not 0.0 ms
  for (size_t kind = 0; kind < kStepRows.size(); ++kind)
    if (std::max(columns[0].seconds[kind], columns[1].seconds[kind]) >= kShown)
      row(kStepRows[kind], columns[0].number[kind] > 0 ? std::to_string(columns[0].number[kind]) : "",
          [&](const StepColumn& column) { return fmt::format("{:.1f}", 1e3 * column.seconds[kind]); });
  row("**sum**", "",
      [](const StepColumn& column) { return fmt::format("{:.1f}", 1e3 * column.plan.step_s); });
  row("images/s", "",
      [](const StepColumn& column) { return fmt::format("{:.0f}", column.plan.images_per_s); });
  row("share of the peak", "",
      [](const StepColumn& column) { return fmt::format("{:.0f} %", 100 * column.share_of_peak); });
  row("memory", "",
      [](const StepColumn& column) { return fmt::format("{:.1f} GiB", gib(column.plan.needed_bytes)); });
  for (const std::string& way : choice_names<Untried>())
    text += fmt::format("| sum with `--untried-gpu {}` |  |  | {:.1f} |\n", way,
                        1e3 * column_of(options, way).plan.step_s);
  return text;
}

}  // namespace kiln
