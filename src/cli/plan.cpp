#include "plan/plan.h"
#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "plan/calibrate.h"

namespace kiln::cli {

namespace {

constexpr const char* kExamples = R"(Examples
  Does DiT-XL/2 at 512 px train on four 24 GB cards, and how?
    kiln plan --model DiT-XL/2 --image-size 512 --gpu RTX-4090 --gpus 4 --compute-dtype bf16
  With eight images per pass, activations recomputed and the training state divided among the cards:
    kiln plan --model DiT-XL/2 --image-size 512 --gpu RTX-4090 --gpus 4 --compute-dtype bf16
      --micro-batch 8 --recompute all --zero-stage 2
  The published run on 8 rented GPUs, with its cost:
    kiln plan --recipe recipes/dit-xl-2-256.toml --gpu A100-80G --gpus 8 --micro-batch 32 --price-per-gpu-hour 2
GPUs: V100, T4, RTX-3090, RTX-4090, A40, L40S, A100-40G, A100-80G, A800-80G, H100, H200, B200, cpu (this machine))";

struct PlanArguments {
  PlanOptions options;
  bool json = false, calibrate = false;
  std::string html;
};

void add_plan_options(CLI::App& command, PlanArguments& arguments) {
  PlanOptions& options = arguments.options;
  command.add_option("--gpu", options.gpu, "What it trains on; cpu: this machine (names below)")
      ->capture_default_str();
  command.add_option("--gpus", options.gpus, "How many of them, in all")->capture_default_str();
  command
      .add_option(
          "--zero-stage", options.zero_stage,
          "Divide among the GPUs: 1 optimizer state and EMA, 2 gradients too, 3 weights too (0: nothing)")
      ->capture_default_str();
  command
      .add_option("--offload-optimizer", options.offload_optimizer,
                  "Where master weights, moments and EMA live: none (the GPU), cpu or nvme")
      ->capture_default_str();
  command.add_option("--steps", options.steps, "Steps to plan for (0: --max-steps)")->capture_default_str();
  command.add_option("--dataset-size", options.dataset_size, "Images (0: those of --data, or ImageNet's)")
      ->capture_default_str();
  command.add_option("--price-per-gpu-hour", options.price_per_gpu_hour, "Adds the cost (0: unknown)")
      ->capture_default_str();
  command.add_flag(
      "--calibrate", arguments.calibrate,
      "First measure this machine (a minute; --device says which) and keep its profile for later plans");
  command.add_flag("--json", arguments.json, "Print one JSON object instead of text");
  command.add_option("--html", arguments.html, "Also write a report with plots into this file");
}

void run(const PlanArguments& arguments) {
  if (arguments.calibrate) {
    const std::string path = store_profile(calibrate(arguments.options.train.device));
    fmt::print(stderr, "profile kept in {}\n", path);
  }
  const Plan plan = make_plan(arguments.options);
  if (arguments.json)
    fmt::print("{}\n", to_json(plan).dump(1));
  else
    fmt::print("{}", to_text(plan));
  if (!arguments.html.empty()) write_file_atomically("plan", arguments.html, to_html(plan));
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "plan", "Tell whether a training run fits, how fast it is and what it costs, without running it");
  auto arguments = std::make_shared<PlanArguments>();
  add_plan_options(*command, *arguments);
  const auto train =
      add_train_options(*command, "Options of kiln train: all of them (--data may be left out)");
  command->footer(kExamples);
  command->callback([=] {
    arguments->options.train = resolve(*command, *train);
    run(*arguments);
  });
}

}  // namespace kiln::cli
