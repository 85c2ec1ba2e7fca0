#include "cli/probe.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "core/stop_signal.h"
#include "parallel/machine.h"
#include "plan/price/machine_profile.h"
#include "plan/report/variants.h"
#include "run/option_values.h"
#include "watch/phase_timers.h"
#include "watch/prediction.h"

namespace kiln::cli {

namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  if (end == std::string::npos) return "";
  const size_t begin = text.find_last_of('\n', end);
  return text.substr(begin == std::string::npos ? 0 : begin + 1,
                     end - (begin == std::string::npos ? 0 : begin + 1) + 1);
}

// Runs a command line in a shell and returns its status. std::system() would hide a Ctrl-C from this process,
// which must not begin the next variant then.
int run_in_shell(std::string line) {
  std::string shell = "sh", from_text = "-c";
  char* const arguments[] = {shell.data(), from_text.data(), line.data(), nullptr};
  pid_t child = 0;
  if (const int error = posix_spawn(&child, "/bin/sh", nullptr, nullptr, arguments, environ); error != 0)
    fail("probe", "cannot start /bin/sh: {}", std::generic_category().message(error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return status;
}

// Runs a variant in a process of its own. So one that runs out of memory does not end the others, and none
// finds what another has cached.
VariantResult run_variant(const VariantsCommand& command, const Variant& variant, const std::string& folder) {
  const std::string train = command_line(variant.options), name = "kiln train",
                    program = std::filesystem::read_symlink("/proc/self/exe").string(),
                    out = folder + "/result.json", errors = folder + "/errors";
  // Given even if it is the default: a probe on a CPU takes a smaller batch if none is given.
  const std::string batch = train.find("--global-batch ") == std::string::npos
                                ? fmt::format(" --global-batch {}", variant.options.global_batch)
                                : "";
  const std::string line = fmt::format("'{}' probe --json --steps {}{}{}{} > '{}' 2> '{}'", program,
                                       command.steps, command.checkpoint ? "" : " --no-checkpoint",
                                       train.substr(name.size()), batch, out, errors);
  if (run_in_shell(line) != 0) {
    const std::string problem = last_line(content_of(errors));
    return {.problem = !problem.empty() ? problem : "it ended without a message: out of memory?"};
  }
  const nlohmann::json result = nlohmann::json::parse(content_of(out));
  const StepFigures measured = figures_from_json(result.at("measured"));
  return {.step_s = measured.step_s,
          .images_per_s = measured.images_per_s,
          .encoding_share = encoding_seconds(measured.phase_s) / measured.step_s,
          .memory_bytes = measured.peak_bytes,
          .details = result};
}

}  // namespace

nlohmann::json compare_variants(const VariantsCommand& command, const TrainOptions& base,
                                const std::set<std::string>& given) {
  const std::vector<Variant> variants = read_variants(command.file, base, given);
  std::vector<VariantResult> results;
  const TemporaryFolder folder("probe");
  const StopSignal stop;
  for (const Variant& variant : variants) {
    VariantResult result;
    if (!stop.requested()) {
      fmt::print(stderr, "kiln probe: {}\n", variant.name);
      PlanOptions plan;
      plan.gpu = command.gpu;
      result = command.gpu.empty() ? run_variant(command, variant, folder.path().string())
                                   : plan_variant(variant, plan);
    }
    // The variant under way was stopped too, before its last step.
    if (stop.requested()) result = {.problem = "stopped by a signal"};
    results.push_back(std::move(result));
  }
  const std::string source =
      command.gpu.empty()
          ? fmt::format("measured on {}, {} steps each; memory of tensors",
                        machine_name(choose_device(base.compute.device)), command.steps)
          : fmt::format("planned on {}; memory of the device", find_profile(command.gpu).name);
  return variants_json(source, variants, results);
}

}  // namespace kiln::cli
