#include "parallel/ranks/ranks.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "core/error.h"
#include "core/files/text_file.h"
#include "core/units.h"

namespace kiln {

namespace {

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::string text(const char* name, const std::string& otherwise = "") const {
    const char* value = environment_(name);
    return value && *value ? value : otherwise;
  }
  bool has(const char* name) const { return !text(name).empty(); }

  int64_t number(const char* name) const {
    const std::string value = text(name);
    if (value.empty()) fail("ranks", "{} is not set: start all ranks with the same launcher", name);
    const std::optional<int64_t> result = whole_number(value);
    if (!result || *result < 0) fail("ranks", "{} expects a number, got '{}'", name, value);
    return *result;
  }
  int64_t number(const char* name, int64_t otherwise) const { return has(name) ? number(name) : otherwise; }

 private:
  const Environment& environment_;
};

// The environment variables of one launcher.
struct LauncherNames {
  const char *rank, *world_size, *local_rank, *local_world_size;
};
constexpr LauncherNames kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr LauncherNames kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                 "OMPI_COMM_WORLD_LOCAL_SIZE"};
// SLURM_NTASKS is also set in a batch script that starts one process itself. Only srun sets the step's
// variables.
constexpr LauncherNames kSlurm{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                               "SLURM_STEP_TASKS_PER_NODE"};

std::optional<LauncherNames> launcher_of(const Variables& variables) {
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) return kTorchrun;
  if (variables.has(kOpenMpi.world_size)) return kOpenMpi;
  // A step of one task is a shell more often than a launcher: either way there is one rank, which may launch.
  if (variables.number(kSlurm.world_size, 1) > 1) return kSlurm;
  return std::nullopt;
}

int64_t local_world_size_of(const Variables& variables, const LauncherNames& names, int64_t world_size) {
  const std::string value = variables.text(names.local_world_size);
  if (value.find_first_of("(,") == std::string::npos)
    return variables.number(names.local_world_size, world_size);
  const std::vector<int64_t> tasks = slurm_tasks_per_node(value);
  if (std::ranges::count(tasks, tasks.front()) == std::ssize(tasks)) return tasks.front();
  const int64_t node = variables.number("SLURM_NODEID");
  if (node >= static_cast<int64_t>(tasks.size()))
    fail("ranks", "SLURM_NODEID {} is beyond the nodes of {} ({})", node, names.local_world_size, value);
  return tasks[static_cast<size_t>(node)];
}

// Returns "" if the job has none.
std::string secret_of(const Variables& variables) {
  constexpr size_t kLeastBytes = 16;
  constexpr const char *kText = "KILN_JOB_SECRET", *kFile = "KILN_JOB_SECRET_FILE";
  const std::string path = variables.text(kFile);
  const bool is_in_file = !variables.has(kText) && !path.empty();
  std::string secret = is_in_file ? read_text_file("ranks", path) : variables.text(kText);
  while (!secret.empty() && std::isspace(static_cast<unsigned char>(secret.back()))) secret.pop_back();
  if (secret.size() < kLeastBytes && (is_in_file || variables.has(kText)))
    fail("ranks", "{} expects {} characters or more, got {}: openssl rand -hex 32 makes a secret",
         is_in_file ? kFile : kText, kLeastBytes, secret.size());
  return secret;
}

}  // namespace

std::vector<int64_t> slurm_tasks_per_node(const std::string& list) {
  std::vector<int64_t> tasks;
  const char *at = list.data(), *const end = at + list.size();
  const auto refuse = [&] {
    fail("ranks", "SLURM_STEP_TASKS_PER_NODE expects numbers of tasks like 8(x2),4, got '{}'", list);
  };
  const auto number = [&] {
    int64_t result = 0;
    const auto [rest, error] = std::from_chars(at, end, result);
    if (error != std::errc() || result < 1 || result > 1 << 20) refuse();
    at = rest;
    return result;
  };
  const auto skip = [&](std::string_view text) {
    const bool found = std::string_view(at, end).starts_with(text);
    if (found) at += text.size();
    return found;
  };
  do {
    const int64_t count = number();
    int64_t repeats = 1;
    if (skip("(x")) {
      repeats = number();
      if (!skip(")")) refuse();
    }
    tasks.insert(tasks.end(), static_cast<size_t>(repeats), count);
  } while (skip(","));
  if (at != end) refuse();
  return tasks;
}

std::string first_slurm_host(const std::string& nodelist) {
  const size_t bracket = nodelist.find('['), comma = nodelist.find(',');
  if (bracket == std::string::npos || comma < bracket) return nodelist.substr(0, comma);
  const size_t end = nodelist.find_first_of(",-]", bracket);
  return nodelist.substr(0, bracket) + nodelist.substr(bracket + 1, end - bracket - 1);
}

Ranks ranks_from_environment(const Environment& environment) {
  const Variables variables(environment);
  Ranks ranks;
  const auto names = launcher_of(variables);
  if (!names) return ranks;
  ranks.launched = true;
  ranks.rank = variables.number(names->rank);
  ranks.world_size = variables.number(names->world_size);
  if (ranks.world_size < 1 || ranks.rank >= ranks.world_size)
    fail("ranks", "{} expects 0 to {} - 1 ({}), got {}", names->rank, names->world_size, ranks.world_size,
         ranks.rank);
  ranks.local_rank = variables.number(names->local_rank, ranks.rank);
  ranks.local_world_size = local_world_size_of(variables, *names, ranks.world_size);
  if (ranks.local_rank >= ranks.local_world_size)
    fail("ranks", "{} expects less than {} ({}), got {}", names->local_rank, names->local_world_size,
         ranks.local_world_size, ranks.local_rank);
  const bool one_machine = ranks.local_world_size == ranks.world_size;
  ranks.launcher_hosts = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  const std::string slurm_host = first_slurm_host(variables.text("SLURM_STEP_NODELIST"));
  ranks.master_addr = variables.text("MASTER_ADDR", one_machine ? "127.0.0.1" : slurm_host);
  if (ranks.master_addr.empty())
    fail("ranks", "MASTER_ADDR is not set: ranks on several machines need the address of rank 0's machine");
  // Under another name of this machine, rank 0 would listen to its network, too. Where nobody says how many
  // ranks are here, some may be elsewhere.
  if (one_machine && !ranks.launcher_hosts && variables.has(names->local_world_size))
    ranks.master_addr = "127.0.0.1";
  // Two jobs on one machine must not meet: Slurm's job number tells them apart.
  ranks.master_port = variables.number("MASTER_PORT", 29500 + variables.number("SLURM_JOB_ID", 0) % 20000);
  if (ranks.master_port < 1 || ranks.master_port > 65535)
    fail("ranks", "MASTER_PORT expects 1 to 65535, got {}", ranks.master_port);
  ranks.attempt = variables.text("TORCHELASTIC_RESTART_COUNT", "0");
  ranks.secret = secret_of(variables);
  return ranks;
}

Ranks ranks_from_environment() {
  return ranks_from_environment([](const char* name) { return std::getenv(name); });
}

}  // namespace kiln
