// The tables of docs/plan_tables.md, docs/planning.md and docs/scaling.md.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"
#include "models/registry.h"
#include "plan/price/price.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "plan/run/plan.h"
#include "plan/trace/trace_family.h"

namespace kiln {

namespace {

constexpr double kComfortableShare = 0.85;  // share of the memory that may be used without advice against it
constexpr double kTypicalShare = 0.95;      // share of the speed that larger micro-batches reach
constexpr double kPatienceDays = 7;         // that all steps may take
constexpr int64_t kMicroBatches[] = {8, 16, 32, 64, 128, 256};
constexpr int64_t kMostRentedGpus = 64;

// Returns the run of a table with another model.
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

// Plans the least that one GPU needs without offloading: one image per pass, everything recomputed.
Plan smallest(PlanOptions options) {
  options.train.memory.recompute = SegmentSet::all();
  options.train.global_batch = 2;  // two passes, so that gradients are accumulated; more need no more
  return on_gpus(options, 1, 1);
}

struct Typical {
  int64_t micro_batch = 0;
  double images_per_s = 0;
};

// Returns the smallest micro-batch that is nearly as fast as the fastest one that fits comfortably, with all
// activations kept.
Typical typical_micro_batch(const PlanOptions& options) {
  const MachineProfile machine = planned_machine(options);
  const int64_t most = options.train.global_batch;
  TraceFamily family(options.train, describe(options.train).shape, machine.device,
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

// Plans the run on the fewest GPUs (1, 2, 4, ...) that do all steps in time.
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
      "for {} steps | days | published FID |\n|---|---|---|---|---|---|---|---|---|\n",
      planned_machine(options_of_table.plan).name, steps_of(options_of_table.plan));
  for (const char* family : {"S", "B", "L", "XL"})
    for (int64_t patch : {8, 4, 2})
      for (int64_t image_size : {256, 512}) {
        const PlanOptions options =
            published(options_of_table, fmt::format("DiT-{}/{}", family, patch), image_size);
        const Plan plan = in_time(options, typical_micro_batch(options));
        table += fmt::format("| {} | {} | {:.0f} M | {:.1f} GiB | {:.0f} GiB | {} | {} | {:.2f} | {} |\n",
                             options.train.model.name, image_size,
                             static_cast<double>(plan.num_weights) / 1e6, gib(smallest(options).needed_bytes),
                             std::ceil(gib(plan.needed_bytes) / kComfortableShare), plan.micro_batch,
                             plan.options.gpus, plan.days, quality_text(options.train, plan.steps));
      }
  return table + "\n" + text_models_table();
}

// Figures that people quote. `batch` is of one card; days are of 400,000 steps at 256 pixels, of the batches
// of all cards; 0: nothing is quoted.
struct Quoted {
  const char *model, *weights;
  int64_t batch = 0, least_gb = 0, comfortable_gb = 0, gpus = 0, days = 0;
};
constexpr Quoted kQuoted[] = {{"DiT-S/8", "33 M", 64, 8, 12, 1, 5},
                              {"DiT-B/4", "79 M", 32, 12, 24, 4, 3},
                              {"DiT-L/2", "369 M", 16, 24, 48, 0, 0},
                              {"DiT-XL/2", "1.06 B", 8, 48, 80, 8, 7}};
constexpr const char* kGamingCard = "RTX-3090";

// Returns the days of the quoted run at its own batch.
double days_as_quoted(const PlanOptions& like, const Quoted& quoted, const char* gpu,
                      const char* autoencoder) {
  PlanOptions options = like;
  options.gpu = gpu;
  options.gpus_per_node = quoted.gpus;  // the guide's cards are in one machine
  options.train.global_batch = quoted.batch * quoted.gpus;
  options.train.zero.stage = quoted.gpus > 1 ? 1 : 0;
  options.train.data.autoencoder = autoencoder;
  return on_gpus(options, quoted.gpus, quoted.batch).days;
}

std::string quoted_models(const TableOptions& table_options) {
  const std::string gpu = planned_machine(table_options.plan).name;
  std::string table = fmt::format(
      "| model | | weights | images a pass | smallest memory | comfortable memory | images a step | days on "
      "{} | days on {}, pictures encoded on the way |\n|---|---|---|---|---|---|---|---|---|\n",
      gpu, kGamingCard);
  for (const Quoted& quoted : kQuoted) {
    const PlanOptions options = published(table_options, quoted.model, 256);
    const Plan plan = on_gpus(options, 1, typical_micro_batch(options).micro_batch);
    const bool has_days = quoted.gpus > 0;
    const auto days = [&](double number) {
      return has_days ? fmt::format("{} on {}", number_text(number, 3), quoted.gpus) : "";
    };
    const auto as_quoted = [&](const char* card, const char* autoencoder) {
      return has_days ? days(days_as_quoted(options, quoted, card, autoencoder)) : "";
    };
    table += fmt::format("| {} | quoted | {} | {} | {} GB | {} GB | {} | {} | {} |\n", quoted.model,
                         quoted.weights, quoted.batch, quoted.least_gb, quoted.comfortable_gb,
                         has_days ? std::to_string(quoted.batch * quoted.gpus) : "",
                         days(static_cast<double>(quoted.days)), days(static_cast<double>(quoted.days)));
    table += fmt::format("| | planned | {:.0f} M | {} | {:.1f} GiB | {:.0f} GiB | | {} | {} |\n",
                         static_cast<double>(plan.num_weights) / 1e6, plan.micro_batch,
                         gib(smallest(options).needed_bytes),
                         std::ceil(gib(plan.needed_bytes) / kComfortableShare), as_quoted(gpu.c_str(), ""),
                         as_quoted(kGamingCard, "sd-vae-ft-mse"));
  }
  return table;
}

// Returns how many times as fast as one RTX-4090 several in a machine are with the guide's own B/4, in steps
// of `images` for so many GPUs.
double speed_up_of_b4(const TableOptions& table_options, int64_t gpus, int64_t (*images)(int64_t gpus)) {
  const auto images_per_s = [&](int64_t number) {
    PlanOptions options = published(table_options, "DiT-B/4", 256);
    options.gpu = "RTX-4090";
    options.gpus_per_node = number;
    options.train.global_batch = images(number);
    return on_gpus(options, number, options.train.global_batch).images_per_s;
  };
  return images_per_s(gpus) / images_per_s(1);
}

std::string quoted_scaling(const TableOptions& table_options) {
  constexpr std::pair<int64_t, double> kQuotedSpeed[] = {{1, 1}, {2, 1.8}, {4, 3.5}, {8, 6.8}};
  std::string table =
      "| GPUs | quoted speed | NVLink (A100-80G) | PCIe, no peer access (RTX-4090) | quoted memory | data "
      "parallel | ZeRO 1 | ZeRO 2 | ZeRO 3 | DiT-B/4 on RTX-4090, 64 images each | DiT-B/4 on RTX-4090, 128 "
      "in all |\n|---|---|---|---|---|---|---|---|---|---|---|\n";
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
        "| {} | {}x | {:.2f}x | {:.2f}x | 1/{} | {:.1f} GiB | {:.1f} GiB | {:.1f} GiB | {:.1f} GiB | {:.2f}x "
        "| {:.2f}x |\n",
        gpus, speed, images_per_s[0] / alone[0], images_per_s[1] / alone[1], gpus, gib(bytes[0]),
        gib(bytes[1]), gib(bytes[2]), gib(bytes[3]),
        speed_up_of_b4(table_options, gpus, [](int64_t number) { return 64 * number; }),
        speed_up_of_b4(table_options, gpus, [](int64_t) { return int64_t{128}; }));
  }
  return table;
}

// DiT-XL/2, 32 images per GPU in one pass: the links have the least time to hide in.
std::string scaling_on(const TableOptions& table_options, const char* gpu) {
  std::vector<Plan> plans;
  for (const auto& [stage, within_node] :
       {std::pair(0, false), {1, false}, {2, false}, {3, false}, {3, true}}) {
    PlanOptions options = published(table_options, "DiT-XL/2", 256);
    options.gpu = gpu;
    options.gpus = 8;
    options.train.zero.stage = stage;
    options.train.zero.shard_within_node = within_node;
    plans.push_back(make_plan(options));
  }
  std::string table = fmt::format(
      "{}, {}, nodes of {}, {} GB/s from node to node:\n\n| GPUs | data parallel | ZeRO 1 | ZeRO 2 | ZeRO 3 "
      "| ZeRO 3 within nodes | data parallel, images/s |\n|---|---|---|---|---|---|---|\n",
      gpu, plans[0].machine.source, plans[0].machine.gpus_per_node,
      number_text(plans[0].machine.network_bytes_per_s / 1e9, 3));
  for (size_t i = 0; i < plans[0].scaling.size(); ++i) {
    const int64_t gpus = plans[0].scaling[i].gpus;
    if (gpus != 1 && gpus < 8) continue;
    table += fmt::format("| {} |", gpus);
    for (const Plan& plan : plans)
      table += fmt::format(" {:.3f} s, {:.0f} % |", plan.scaling[i].step_s, 100 * plan.scaling[i].efficiency);
    table += fmt::format(" {:.0f} |\n", plans[0].scaling[i].images_per_s);
  }
  table += "| memory on 8 |";
  for (const Plan& plan : plans) table += fmt::format(" {:.1f} GiB |", gib(plan.needed_bytes));
  return table + " |\n";
}

constexpr int64_t kGpuCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64};

std::string days_and_cost(const Plan& plan) {
  return number_text(plan.days, 3) + cost_text(plan.options, plan.cost, ", cost ");
}

std::string columns(const Plan& plan) {
  return fmt::format(" {:.3f} | {:.0f} | {} | {:.1f} GiB{} |", plan.step_s, plan.images_per_s,
                     days_and_cost(plan), gib(plan.needed_bytes), plan.fits ? "" : ", does not fit");
}

// Plans the run on so many GPUs. A stage divides nothing on a single one.
Plan on_gpus(PlanOptions options, int64_t gpus) {
  options.gpus = gpus;
  if (gpus == 1 && options.train.offload.params == Placement::kDevice) options.train.zero.stage = 0;
  return make_plan(options);
}

// The run on 1 to 8 GPUs and on twice as many each time after that: with the same batch in all, and with the
// same images per GPU.
std::string gpus_table(const TableOptions& table) {
  const TrainOptions& train = table.plan.train;
  const int64_t batch = train.global_batch, steps = table.plan.steps > 0 ? table.plan.steps : train.max_steps;
  const int64_t each = std::max<int64_t>(1, batch / table.plan.gpus);
  std::string text = fmt::format(
      "{} at {} px, {}, ZeRO stage {}, {}; {} steps of {} images, and on the right of {} images per GPU, "
      "whose days are for as many images in all.\n\n| GPUs | images per GPU | step, s | images/s | days | "
      "memory of one | with {} per GPU: step, s | images/s | days | memory of one "
      "|\n|---|---|---|---|---|---|---|---|---|---|\n",
      train.model.name, train.data.image_size, choice_name(train.compute.dtype), train.zero.stage,
      planned_machine(table.plan).name, steps, batch, each, each);
  for (const int64_t gpus : kGpuCounts) {
    if (gpus > batch) continue;
    // With a rest, some GPUs have an image more than others, and all wait for those.
    PlanOptions fixed = table.plan;
    fixed.train.global_batch = (batch + gpus - 1) / gpus * gpus;
    Plan same_batch = on_gpus(fixed, gpus);
    const double share = static_cast<double>(batch) / static_cast<double>(fixed.train.global_batch);
    same_batch.images_per_s *= share;
    PlanOptions weak = table.plan;
    weak.train.global_batch = each * gpus;
    Plan same_images = on_gpus(weak, gpus);
    const double fewer_steps = static_cast<double>(batch) / static_cast<double>(weak.train.global_batch);
    same_images.days *= fewer_steps;
    same_images.cost *= fewer_steps;
    text += fmt::format("| {} | {} |{}{}\n", gpus,
                        number_text(static_cast<double>(batch) / static_cast<double>(gpus)),
                        columns(same_batch), columns(same_images));
  }
  return text;
}

// DiT-XL/2 with fast-DiT's options one after another, beside what its authors measured on one A100.
std::string options_table(const TableOptions& table) {
  // From its README: one A100, 128 images a step.
  struct Row {
    const char* name;
    bool recompute, half, quoted_fits;
    double steps_per_s;
    int64_t megabytes;
  };
  constexpr Row kRows[] = {{"nothing", false, false, false, 0, 0},
                           {"`--recompute all`", true, false, true, 0.43, 44'045},
                           {"and `--compute-dtype fp16`", true, true, true, 0.56, 40'461},
                           {"and features made before", true, true, true, 0.84, 27'485}};
  std::string text = fmt::format(
      "DiT-XL/2 at 256 px, 128 images a step in one pass, {}, f32 products in TF32:\n\n| options | quoted "
      "steps/s | planned steps/s | quoted memory | planned memory |\n|---|---|---|---|---|\n",
      planned_machine(table.plan).name);
  for (size_t i = 0; i < std::size(kRows); ++i) {
    const Row& row = kRows[i];
    PlanOptions options = table.plan;
    options.gpus = 1;
    TrainOptions& train = options.train;
    train.model.name = "DiT-XL/2";
    train.data.image_size = 256;
    train.global_batch = 128;
    train.compute.tf32 = true;
    train.compute.dtype = row.half ? at::kHalf : at::kFloat;
    train.memory.recompute = row.recompute ? SegmentSet::all() : SegmentSet();
    // KL-f8, whether it is here or not.
    if (i + 1 < std::size(kRows)) train.data.autoencoder = "sd-vae-ft-mse";
    const Plan plan = make_plan(options);
    text += fmt::format("| {} | {} | {:.2f}{} | {} | {:.0f} MB |\n", row.name,
                        row.quoted_fits ? fmt::format("{:.2f}", row.steps_per_s) : "out of memory",
                        1 / plan.step_s, plan.fits ? "" : " (does not fit)",
                        row.quoted_fits ? fmt::format("{} MB", row.megabytes) : "",
                        static_cast<double>(plan.needed_bytes) / static_cast<double>(kMiB));
  }
  return text;
}

// DiT's published results in PyTorch, beside its paper's, with the plan of each run.
std::string results_table(const TableOptions& table) {
  // From the repository's README: 400,000 steps of 256 images, FID of 50,000 pictures by 250 DDPM steps with
  // the mse decoder and no guidance. The paper's are of its own training in JAX.
  struct Row {
    const char* model;
    int64_t seed;
    double quoted_fid;
  };
  constexpr Row kRows[] = {{"DiT-XL/2", 42, 18.1}, {"DiT-B/4", 42, 68.9}, {"DiT-B/4", 100, 68.3}};
  constexpr int64_t kSteps = 400'000, kBatch = 256, kMostGpus = 8;
  std::string text = fmt::format(
      "256 px, {} steps of {} images, {}, {}:\n\n| model | seed | FID of the paper | FID in PyTorch | "
      "planned days on 1 | on {} | memory of one of {} |\n|---|---|---|---|---|---|---|\n",
      kSteps, kBatch, choice_name(table.plan.train.compute.dtype), planned_machine(table.plan).name,
      kMostGpus, kMostGpus);
  for (const Row& row : kRows) {
    PlanOptions options = table.plan;
    options.steps = kSteps;
    options.train.model.name = row.model;
    options.train.data.image_size = 256;
    options.train.global_batch = kBatch;
    options.train.micro_batch = kBatch / kMostGpus;
    const Plan alone = on_gpus(options, 1), most = on_gpus(options, kMostGpus);
    const auto& known = family_of(row.model).quality;
    const auto paper = std::ranges::find_if(known, [&](const PublishedQuality& point) {
      return row.model == std::string_view(point.model) && point.steps == kSteps && point.image_size == 256;
    });
    text += fmt::format("| {} | {} | {:.2f} | {} | {} | {} | {:.1f} GiB |\n", row.model, row.seed, paper->fid,
                        row.quoted_fid, days_and_cost(alone), days_and_cost(most), gib(most.needed_bytes));
  }
  return text;
}

// A model that people compare with these, and that Kiln does not train.
struct OtherModel {
  const char *name, *weights, *quality;
};
// Sana's README; 2,567,463,684 weights by its config. Its two text encoders and its decoder are not counted.
constexpr OtherModel kOthers[] = {{"SDXL (its U-Net; not in Kiln)", "2.6 B", "6.63 MJHQ"}};

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
  if (name == "gpu-step") return gpu_step_table(options);
  fail("plan", "--table expects sizes, gpus, gpu-step, options, results, quoted or scaling, got '{}'", name);
}

std::string text_models_table() {
  std::string table = "| model with captions | weights of the denoiser | published FID |\n|---|---|---|\n";
  for (const Family& family : denoiser_families())
    for (const auto& [name, preset] : family.presets()) {
      if (name == family.name) continue;
      const auto model = build_denoiser(name, nullptr, {.outline = true});
      if (!model->shape().conditioning.takes_text()) continue;
      int64_t weights = 0;
      for (const auto& parameter : model->parameters())
        if (parameter->trainable) weights += parameter->value.numel();
      TrainOptions options;
      options.model.name = name;
      options.data.image_size = model->shape().input_size * family.latents.downsample;
      table += fmt::format("| {} | {:.0f} M | {} |\n", name, static_cast<double>(weights) / 1e6,
                           quality_text(options, 0));
    }
  for (const OtherModel& other : kOthers)
    table += fmt::format("| {} | {} | {} |\n", other.name, other.weights, other.quality);
  return table;
}

}  // namespace kiln
