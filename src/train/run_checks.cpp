#include "train/run_checks.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "core/error.h"
#include "train/setup.h"

namespace kiln {

namespace fs = std::filesystem;

std::vector<std::string> settings_without_effect(const TrainOptions& options, at::Device device,
                                                 int64_t world_size) {
  const TrainOptions defaults;
  const bool is_alone = world_size == 1;
  std::vector<std::string> lines;
  const auto note_if = [&](bool ineffective, const char* option, const std::string& where) {
    if (ineffective) lines.push_back(fmt::format("--{} has no effect {}", option, where));
  };
  const bool validates = !options.validation_data.empty();
  const auto are_features = [](const std::string& data) {
    return data.empty() || data == "synthetic" || fs::exists(fs::path(data) / "store.json");
  };
  note_if(options.enlarge && are_features(options.data) && are_features(options.validation_data), "enlarge",
          "on features: kiln extract --enlarge makes them so");
  note_if(options.validate_every != defaults.validate_every && !validates, "validate-every",
          "without --validation-data");
  note_if(options.validation_images > 0 && !validates, "validation-images", "without --validation-data");
  const int64_t rows = rows_of_walk(options, world_size);
  note_if(options.micro_batch > rows, "micro-batch",
          fmt::format("beyond the {} images that a rank has of a step", rows));
  note_if(options.tf32 && device.is_cpu(), "tf32", "on a CPU");
  note_if(options.offload_activations != "none" && device.is_cpu(), "offload-activations",
          "on a CPU but to recompute");
  note_if(options.offload_optimizer == "cpu" && device.is_cpu(), "offload-optimizer cpu",
          "on a CPU, whose memory it is");
  note_if(
      !options.nvme_path.empty() && options.offload_optimizer != "nvme" && options.offload_params != "nvme",
      "nvme-path", "without --offload-optimizer nvme or --offload-params nvme");
  note_if(options.offload_params == "cpu" && device.is_cpu(), "offload-params cpu",
          "on a CPU, whose memory it is");
  note_if(options.zero_stage > 0 && is_alone && options.offload_params == "none", "zero-stage",
          "on a single rank");
  note_if(options.shard_within_node && (options.zero_stage == 0 || is_alone), "shard-within-node",
          is_alone ? "on a single rank" : "with --zero-stage 0");
  note_if(!options.reduce_dtype.empty() && is_alone, "reduce-dtype", "on a single rank");
  note_if(options.reduce_bucket_size > 0 && is_alone, "reduce-bucket-size", "on a single rank");
  const std::string below = fmt::format("with --zero-stage {}", options.zero_stage);
  note_if(options.persist_threshold > 0 && options.zero_stage < 3, "persist-threshold", below);
  note_if(options.prefetch_segments != defaults.prefetch_segments && options.zero_stage < 3,
          "prefetch-segments", below);
  return lines;
}

std::vector<std::string> resume_warnings(const TrainOptions& options, const TrainStateInfo& saved,
                                         const TrainStateInfo& now) {
  const nlohmann::json &saved_options = saved.config.at("options"), &options_now = now.config.at("options");
  const OptionChanges changes = compare_options(saved_options, options_now);
  if (!changes.refused.empty())
    fail("resume", "{} holds a run with other settings: {}; give the same ones, or another --out",
         options.out, fmt::join(changes.refused, ", "));
  if (saved.config.at("data") != now.config.at("data"))
    fail("resume",
         "{} was trained on other data ({}) than --data {} ({}): give the same store, or another --out",
         options.out, saved.config.at("data").get<std::string>(), options.data,
         now.config.at("data").get<std::string>());

  std::vector<std::string> lines;
  if (!changes.warned.empty())
    lines.push_back(fmt::format("resuming with {}: further bits differ from those of an uninterrupted run",
                                fmt::join(changes.warned, ", ")));
  for (const char* end : {"max-steps", "max-minutes"})
    if (options.lr_schedule != "constant" && saved_options.at(end) != options_now.at(end))
      lines.push_back(
          fmt::format("--{} {} instead of {} moves the end of the {} schedule: the learning rate jumps here",
                      end, options_now.at(end).dump(), saved_options.at(end).dump(), options.lr_schedule));
  if (saved.world_size != now.world_size)
    lines.push_back(fmt::format("resuming on {} ranks what {} began: sums over ranks round differently",
                                now.world_size, saved.world_size));
  if (saved.machine != now.machine || saved.num_threads != now.num_threads)
    lines.push_back(
        fmt::format("resuming on {} with {} threads what {} with {} threads began: further bits differ from "
                    "those of an uninterrupted run",
                    now.machine, now.num_threads, saved.machine, saved.num_threads));
  return lines;
}

}  // namespace kiln
