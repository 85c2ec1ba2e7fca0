#include "plan/report/run_tables.h"

#include <algorithm>

#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"
#include "models/registry.h"
#include "plan/run/make_plan.h"

namespace kiln {

namespace {

constexpr int64_t kGpuCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64};

std::string days_and_cost(const Plan& plan) {
  const std::string days = fmt::format("{:.3g}", plan.days);
  return plan.options.price_per_gpu_hour > 0 ? fmt::format("{}, cost {:.0f}", days, plan.cost) : days;
}

std::string columns(const Plan& plan) {
  return fmt::format(" {:.3f} | {:.0f} | {} | {:.1f} GiB{} |", plan.step_s, plan.images_per_s,
                     days_and_cost(plan), gib(plan.needed_bytes), plan.fits ? "" : ", does not fit");
}

// A stage divides nothing on a single GPU.
Plan on_gpus(PlanOptions options, int64_t gpus) {
  options.gpus = gpus;
  if (gpus == 1 && options.train.offload.params == Placement::kDevice) options.train.zero.stage = 0;
  return make_plan(options);
}

}  // namespace

std::string gpus_table(const TableOptions& table) {
  const TrainOptions& train = table.plan.train;
  const int64_t batch = train.global_batch, steps = table.plan.steps > 0 ? table.plan.steps : train.max_steps;
  const int64_t each = std::max<int64_t>(1, batch / table.plan.gpus);
  std::string text = fmt::format(
      "{} at {} px, {}, ZeRO stage {}, {}; {} steps of {} images, and on the right of {} images per GPU, "
      "whose "
      "days are for as many images in all.\n\n| GPUs | images per GPU | step, s | images/s | days | memory "
      "of "
      "one | with {} per GPU: step, s | images/s | days | memory of one "
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
    text += fmt::format("| {} | {:.4g} |{}{}\n", gpus, static_cast<double>(batch) / static_cast<double>(gpus),
                        columns(same_batch), columns(same_images));
  }
  return text;
}

std::string options_table(const TableOptions& table) {
  // Its README, one A100, 128 images a step.
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
      "steps/s | "
      "planned steps/s | quoted memory | planned memory |\n|---|---|---|---|---|\n",
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
    if (i + 1 < std::size(kRows)) train.data.autoencoder = "sd-vae-ft-mse";  // KL-f8, there or not
    const Plan plan = make_plan(options);
    text += fmt::format("| {} | {} | {:.2f}{} | {} | {:.0f} MB |\n", row.name,
                        row.quoted_fits ? fmt::format("{:.2f}", row.steps_per_s) : "out of memory",
                        1 / plan.step_s, plan.fits ? "" : " (does not fit)",
                        row.quoted_fits ? fmt::format("{} MB", row.megabytes) : "",
                        static_cast<double>(plan.needed_bytes) / static_cast<double>(kMiB));
  }
  return text;
}

std::string results_table(const TableOptions& table) {
  // The repository's README: 400,000 steps of 256 images, FID of 50,000 by 250 DDPM steps with the mse
  // decoder and no guidance; the paper's by its own training in JAX.
  struct Row {
    const char* model;
    int64_t seed;
    double quoted_fid;
  };
  constexpr Row kRows[] = {{"DiT-XL/2", 42, 18.1}, {"DiT-B/4", 42, 68.9}, {"DiT-B/4", 100, 68.3}};
  constexpr int64_t kSteps = 400'000, kBatch = 256, kMostGpus = 8;
  std::string text = fmt::format(
      "256 px, {} steps of {} images, {}, {}:\n\n| model | seed | FID of the paper | FID in PyTorch | "
      "planned "
      "days on 1 | on {} | memory of one of {} |\n|---|---|---|---|---|---|---|\n",
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

}  // namespace kiln
