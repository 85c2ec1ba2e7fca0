#include "evaluate/evaluate_command.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <span>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/xxh3.h"
#include "core/text/json_text.h"
#include "core/text/printable.h"
#include "core/text/utf8.h"
#include "evaluate/evaluation.h"
#include "evaluate/protocol.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "sample/prompts.h"
#include "sample/sample_source.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void check(const EvaluateCommand& command) {
  if (command.samples.empty()) fail("evaluate", "expected a folder, an .npz or a run to judge");
  if (command.reference.empty() && command.metrics != std::vector<std::string>{"inception_score"})
    fail("evaluate", "expected --reference: pictures or statistics to compare with");
  if (command.num_pictures < 0)
    fail("evaluate", "expected --num-pictures of at least 1, got {}", command.num_pictures);
  if (command.k < 1) fail("evaluate", "expected --k of at least 1, got {}", command.k);
}

// Draws the run's samples and returns their folder. Continues what an earlier call with the same settings
// drew.
std::string draw_samples(const EvaluateCommand& command, ProcessGroup& group) {
  SampleCommand sampling = command.sampling;
  sampling.run = command.samples;
  if (command.num_pictures > 0) sampling.num_images = command.num_pictures;
  if (!sampling.prompts_file.empty())
    for (std::string& prompt : read_prompts(sampling.prompts_file))
      sampling.prompts.push_back(std::move(prompt));
  sampling.prompts_file.clear();
  settle_weights(sampling, group);
  const fs::path checkpoint = fs::path(sampling.weights).parent_path();
  std::string settings = fmt::format(
      "{} {} {} {} {} {} {} {} {} {}", sampling.weights, sampling.num_images, sampling.cfg_scale.value_or(-1),
      sampling.sampler, sampling.num_sampling_steps, sampling.seed, sampling.random_labels,
      sampling.guidance_interval, sampling.autoencoder, sampling.compute_dtype);
  if (!sampling.negative_prompt.empty()) settings += " " + sampling.negative_prompt;
  for (const std::string& piece : {sampling.base, sampling.text_encoder})
    if (!piece.empty()) settings += " " + piece;
  for (const std::string& prompt : sampling.prompts) settings += "\n" + prompt;
  sampling.out =
      (fs::path(command.samples) / "evaluation" /
       fmt::format("{}-{}", checkpoint.filename().string(), xxh3_hex(std::as_bytes(std::span(settings)))))
          .string();
  run_sample_command(sampling, group);
  return sampling.out;
}

// The first rank prints "samples: 640/50000 pictures" to stderr every 10 s and at the end.
ExtractionOptions extraction_options(const EvaluateCommand& command, const std::string& what, bool is_shown) {
  ExtractionOptions options{.batch = command.batch};
  if (is_shown)
    options.progress = [what, printed = Clock::now()](int64_t done, int64_t total) mutable {
      if (done < total && seconds_since(printed) < 10) return;
      printed = Clock::now();
      fmt::print(stderr, "kiln evaluate: {}: {}/{} pictures\n", what, done, total);
    };
  return options;
}

void say_what_is_left_out(const MetricChoice& choice, const PictureSet& reference, const std::string& path) {
  std::string names;
  const auto leave_out = [&](const char* name) { names += (names.empty() ? "" : ", ") + std::string(name); };
  if (choice.has("fid") && !reference.gaussian) leave_out("fid");
  if (choice.has("sfid") && !reference.spatial) leave_out("sfid");
  if (choice.has("precision_recall") && !reference.features.defined()) leave_out("precision_recall");
  if (choice.has("kid") && !reference.features.defined()) leave_out("kid");
  if (!names.empty())
    fmt::print(stderr, "note: {} holds statistics alone, which give no {}\n", printable(path), names);
}

void evaluate(const EvaluateCommand& command, ProcessGroup& group) {
  check(command);
  const Clock::time_point begin = Clock::now();
  MetricChoice choice = choose_metrics(feature_net_kind(command.net), command.metrics);
  choice.splits = command.splits;
  choice.k = command.k;
  const bool judges_run = is_run_folder(command.samples);
  const std::string path = judges_run ? draw_samples(command, group) : command.samples;
  const at::Device device = parse_device(command.device, group.ranks().local_rank);
  apply(ComputeSettings{.device = device, .threads = command.threads, .cpu_share = cpu_share(group)});
  const auto net = load_feature_net(command.net, command.net_weights, command.resize, device);

  PictureSet reference;
  if (!command.reference.empty())
    reference = measure_reference(command.reference, command.crop, *net, choice,
                                  extraction_options(command, "reference", group.rank() == 0), group);
  ExtractionOptions options = extraction_options(command, "samples", group.rank() == 0);
  options.num_pictures = judges_run ? 0 : command.num_pictures;
  const PictureSet samples =
      measure_pictures(*net, *PictureSource::open(path, 0), needs_of_samples(choice), options, group);
  if (group.rank() != 0) return;
  say_what_is_left_out(choice, reference, command.reference);

  const SampleOrigin origin = origin_of_samples(path);
  if (origin.protocol.is_null())
    fmt::print(
        stderr,
        "kiln evaluate: nothing says how {} was drawn, as the sampling.json of kiln sample does: all such "
        "samples share one stamp\n",
        printable(path));
  json result = stamped(metric_values(choice, net->name, samples, reference),
                        protocol_of(*net, choice, samples, reference, command.crop, origin.protocol));
  result["subject"] = {{"samples", path}, {"pictures", samples.fingerprint}, {"origin", origin.subject}};
  result["reference_path"] = command.reference;
  result["seconds"] = seconds_since(begin);
  // First of all, so that a full disk does not lose what was measured for hours.
  fmt::print("{}\n", dump_utf8(result, 2));
  std::fflush(stdout);
  if (judges_run)
    append_line("evaluate", (fs::path(command.samples) / "evaluations.jsonl").string(), dump_utf8(result));
  if (!command.out.empty()) write_file_atomically("evaluate", command.out, dump_utf8(result, 2) + "\n");
  if (!command.save_reference.empty()) write_statistics(command.save_reference, reference);
}

}  // namespace

void run_evaluate_command(const EvaluateCommand& command, ProcessGroup& group) {
  as_rank(group, [&] { evaluate(command, group); });
}

void compare_results(const std::vector<std::string>& files) {
  std::vector<json> results;
  for (const std::string& path : files) results.push_back(read_json_file("evaluate", path));
  fmt::print("{}", printable(comparison_text(files, results), "\n"));
}

}  // namespace kiln
