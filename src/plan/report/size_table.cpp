#include "plan/report/report.h"
#include "plan/report/run_tables.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/units.h"
#include "plan/price/price.h"
#include "plan/run/make_plan.h"
#include "plan/trace/planned_data.h"
#include "plan/trace/trace_family.h"

namespace kiln {

namespace {

constexpr double kComfortableShare = 0.85;  // of the memory that may be used without advice against it
constexpr double kTypicalShare = 0.95;      // of the speed that larger micro-batches reach
constexpr double kPatienceDays = 7;         // for all steps
constexpr int64_t kMicroBatches[] = {8, 16, 32, 64, 128, 256};
constexpr int64_t kMostRentedGpus = 64;

// The run of a table with another model.
PlanOptions published(const TableOptions& table, const std::string& model, int64_t image_size) {
  PlanOptions options = table.plan;
  options.train.model.name = model;
  options.train.data.image_size = image_size;
  return options;
}

int64_t steps_of(const PlanOptions& options) {
  return options.steps > 0 ? options.steps : options.train.max_steps;
}

Plan on_gpus(PlanOptions options, int64_t gpus, int64_t micro_batch) {
  options.gpus = gpus;
  const int64_t rank_batch = options.train.global_batch / gpus;
  options.train.micro_batch = micro_batch < rank_batch ? micro_batch : 0;
  return make_plan(options);
}

// The least that one GPU needs without offloading: one image per pass, everything recomputed.
Plan smallest(PlanOptions options) {
  options.train.memory.recompute = SegmentSet::all();
  options.train.global_batch = 2;  // two passes, so that gradients are accumulated; more need no more
  return on_gpus(options, 1, 1);
}

struct Typical {
  int64_t micro_batch = 0;
  double images_per_s = 0;
};

// The smallest micro-batch that is nearly as fast as the fastest one that fits comfortably, keeping all.
Typical typical_micro_batch(const PlanOptions& options) {
  const MachineProfile machine = planned_machine(options);
  const int64_t most = options.train.global_batch;
  TraceFamily family(options.train, planned_shape(options.train), machine.device,
                     std::max<int64_t>(most, kMicroBatches[0]));
  std::vector<Typical> fitting;
  for (int64_t micro_batch : kMicroBatches) {
    if (!fitting.empty() && micro_batch > most) break;
    const StepTrace& trace = family.at(micro_batch, micro_batch);
    const auto comfortable =
        static_cast<int64_t>(kComfortableShare * static_cast<double>(machine.memory_bytes));
    if (!fitting.empty() && trace.memory.peak_bytes + machine.context_bytes > comfortable) break;
    const StepPrice price = price_step(trace.spans, machine);
    const double pass = price.seconds - price.by_phase[static_cast<size_t>(StepPhase::kOptimizer)];
    fitting.push_back({.micro_batch = micro_batch, .images_per_s = static_cast<double>(micro_batch) / pass});
  }
  const double best = std::ranges::max(fitting, {}, &Typical::images_per_s).images_per_s;
  return *std::ranges::find_if(fitting,
                               [&](const Typical& t) { return t.images_per_s >= kTypicalShare * best; });
}

// On the fewest GPUs (1, 2, 4, ...) that do all steps in time.
Plan in_time(const PlanOptions& options, const Typical& typical) {
  const double images = static_cast<double>(steps_of(options) * options.train.global_batch);
  const double days_on_one = images / typical.images_per_s / 86400;
  int64_t gpus = 1;
  const int64_t most = std::min(kMostRentedGpus, options.train.global_batch);
  while (gpus < most && options.train.global_batch % (2 * gpus) == 0 &&
         days_on_one / static_cast<double>(gpus) > kPatienceDays)
    gpus *= 2;
  Plan plan = on_gpus(options, gpus, typical.micro_batch);
  while (plan.days > kPatienceDays && gpus < most && options.train.global_batch % (2 * gpus) == 0)
    plan = on_gpus(options, gpus *= 2, typical.micro_batch);
  return plan;
}

std::string sizes(const TableOptions& options_of_table) {
  std::string table = fmt::format(
      "| model | pixels | weights | smallest GPU memory | comfortable GPU memory | typical micro-batch | {} "
      "for {} "
      "steps | days |\n|---|---|---|---|---|---|---|---|\n",
      planned_machine(options_of_table.plan).name, steps_of(options_of_table.plan));
  for (const char* family : {"S", "B", "L", "XL"})
    for (int64_t patch : {8, 4, 2})
      for (int64_t image_size : {256, 512}) {
        const PlanOptions options =
            published(options_of_table, fmt::format("DiT-{}/{}", family, patch), image_size);
        const Plan plan = in_time(options, typical_micro_batch(options));
        table += fmt::format("| {} | {} | {:.0f} M | {:.1f} GiB | {:.0f} GiB | {} | {} | {:.2f} |\n",
                             options.train.model.name, image_size,
                             static_cast<double>(plan.num_weights) / 1e6, gib(smallest(options).needed_bytes),
                             std::ceil(gib(plan.needed_bytes) / kComfortableShare), plan.micro_batch,
                             plan.options.gpus, plan.days);
      }
  return table;
}

// What people quote. Days are of 400,000 steps at 256 pixels; 0: nothing is quoted.
struct Quoted {
  const char *model, *weights;
  int64_t batch = 0, least_gb = 0, comfortable_gb = 0, gpus = 0, days = 0;
};
constexpr Quoted kQuoted[] = {{"DiT-S/8", "33 M", 64, 8, 12, 1, 5},
                              {"DiT-B/4", "79 M", 32, 12, 24, 4, 3},
                              {"DiT-L/2", "369 M", 16, 24, 48, 0, 0},
                              {"DiT-XL/2", "1.06 B", 8, 48, 80, 8, 7}};

std::string quoted_models(const TableOptions& table_options) {
  std::string table = fmt::format(
      "| model | | weights | images a pass | smallest memory | comfortable memory | days on {} "
      "|\n|---|---|---|---|---|---|---|\n",
      planned_machine(table_options.plan).name);
  for (const Quoted& quoted : kQuoted) {
    const PlanOptions options = published(table_options, quoted.model, 256);
    const Plan plan =
        on_gpus(options, std::max<int64_t>(1, quoted.gpus), typical_micro_batch(options).micro_batch);
    table += fmt::format("| {} | quoted | {} | {} | {} GB | {} GB | {} |\n", quoted.model, quoted.weights,
                         quoted.batch, quoted.least_gb, quoted.comfortable_gb,
                         quoted.gpus > 0 ? fmt::format("{} on {}", quoted.days, quoted.gpus) : "");
    table += fmt::format("| | planned | {:.0f} M | {} | {:.1f} GiB | {:.0f} GiB | {:.2f} on {} |\n",
                         static_cast<double>(plan.num_weights) / 1e6, plan.micro_batch,
                         gib(smallest(options).needed_bytes),
                         std::ceil(gib(plan.needed_bytes) / kComfortableShare), plan.days, plan.options.gpus);
  }
  return table;
}

std::string quoted_scaling(const TableOptions& table_options) {
  constexpr std::pair<int64_t, double> kQuotedSpeed[] = {{1, 1}, {2, 1.8}, {4, 3.5}, {8, 6.8}};
  std::string table =
      "| GPUs | quoted speed | NVLink (A100-80G) | PCIe, no peer access (RTX-4090) | quoted memory | data "
      "parallel | "
      "ZeRO 1 | ZeRO 2 | ZeRO 3 |\n|---|---|---|---|---|---|---|---|---|\n";
  std::array<double, 2> alone{};
  for (const auto& [gpus, speed] : kQuotedSpeed) {
    std::array<double, 2> images_per_s{};
    std::array<int64_t, 4> bytes{};
    for (size_t i = 0; i < 2; ++i) {
      PlanOptions options = published(table_options, "DiT-XL/2", 256);
      options.gpu = i == 0 ? "A100-80G" : "RTX-4090";
      options.train.memory.recompute = i == 0 ? SegmentSet() : SegmentSet::all();
      images_per_s[i] = on_gpus(options, gpus, 32).images_per_s;
      if (gpus == 1) alone[i] = images_per_s[i];
    }
    for (int64_t stage = 0; stage < 4; ++stage) {
      PlanOptions options = published(table_options, "DiT-XL/2", 256);
      options.train.global_batch = 64 * gpus;
      options.train.zero.stage = gpus > 1 ? stage : 0;
      bytes[static_cast<size_t>(stage)] = on_gpus(options, gpus, 32).needed_bytes;
    }
    table += fmt::format(
        "| {} | {}x | {:.2f}x | {:.2f}x | 1/{} | {:.1f} GiB | {:.1f} GiB | {:.1f} GiB | {:.1f} GiB |\n", gpus,
        speed, images_per_s[0] / alone[0], images_per_s[1] / alone[1], gpus, gib(bytes[0]), gib(bytes[1]),
        gib(bytes[2]), gib(bytes[3]));
  }
  return table;
}

// DiT-XL/2, 32 images per GPU in one pass: the links have the least time to hide in.
std::string scaling_on(const TableOptions& table_options, const char* gpu) {
  std::array<Plan, 4> plans;
  for (int64_t stage = 0; stage < 4; ++stage) {
    PlanOptions options = published(table_options, "DiT-XL/2", 256);
    options.gpu = gpu;
    options.gpus = 8;
    options.train.zero.stage = stage;
    plans[static_cast<size_t>(stage)] = make_plan(options);
  }
  std::string table = fmt::format(
      "{}, {}:\n\n| GPUs | data parallel | ZeRO 1 | ZeRO 2 | ZeRO 3 | ZeRO 3, images/s "
      "|\n|---|---|---|---|---|---|\n",
      gpu, plans[0].machine.source);
  for (size_t i = 0; i < plans[0].scaling.size(); ++i) {
    const int64_t gpus = plans[0].scaling[i].gpus;
    if (gpus != 1 && gpus < 8) continue;
    table += fmt::format("| {} |", gpus);
    for (const Plan& plan : plans)
      table += fmt::format(" {:.3f} s, {:.0f} % |", plan.scaling[i].step_s, 100 * plan.scaling[i].efficiency);
    table += fmt::format(" {:.0f} |\n", plans[3].scaling[i].images_per_s);
  }
  table += "| memory on 8 |";
  for (const Plan& plan : plans) table += fmt::format(" {:.1f} GiB |", gib(plan.needed_bytes));
  return table + " |\n";
}

}  // namespace

std::string markdown_table(const std::string& name, const TableOptions& given) {
  TableOptions options = given;
  if (!options.has("gpu")) options.plan.gpu = "A100-80G";
  if (!options.has("compute-dtype")) options.plan.train.compute.dtype = at::kBFloat16;
  if (name == "sizes") return sizes(options);
  if (name == "quoted") return quoted_models(options) + "\n" + quoted_scaling(options);
  if (name == "scaling") return scaling_on(options, "A100-80G") + "\n" + scaling_on(options, "H100");
  if (name == "gpus") return gpus_table(options);
  if (name == "options") return options_table(options);
  if (name == "results") return results_table(options);
  fail("plan", "--table expects sizes, gpus, options, results, quoted or scaling, got '{}'", name);
}

}  // namespace kiln
