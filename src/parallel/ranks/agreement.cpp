#include "parallel/ranks/agreement.h"

#include <chrono>
#include <map>
#include <vector>

#include "core/error.h"
#include "core/text/some_of.h"
#include "parallel/ranks/heartbeat.h"

namespace kiln {

void agree(ProcessGroup& group, const std::string& what, const std::function<void()>& work) {
  if (group.world_size() == 1) return work();
  std::string mine;
  try {
    work();
  } catch (const std::exception& error) {
    mine = message_of(error);
  }
  const std::vector<std::string> errors = group.gather(mine, what);
  for (size_t rank = 0; rank < errors.size(); ++rank)
    if (!errors[rank].empty())
      throw CommonError(fmt::format("rank {} of {}: {}", rank, errors.size(), errors[rank]));
}

int64_t ranks_to_launch(const std::string& who, int64_t nproc) {
  constexpr int64_t kMostRanks = 1024;  // on one machine
  if (nproc < 0 || nproc > kMostRanks) fail(who, "--nproc expects 0 to {}, got {}", kMostRanks, nproc);
  if (nproc == 0) return 0;
  const Ranks ranks = ranks_from_environment();
  if (!ranks.launched) return nproc > 1 ? nproc : 0;
  if (ranks.local_world_size != nproc)
    fail(who, "--nproc {} does not fit the launcher, which started {} here: leave --nproc out", nproc,
         ranks.local_world_size);
  return 0;
}

void require_same_on_all_ranks(ProcessGroup& group, const nlohmann::json& settings) {
  std::vector<nlohmann::json> of_rank;
  of_rank.reserve(static_cast<size_t>(group.world_size()));
  for (const std::string& text : group.gather(settings.dump(), "versions and options"))
    of_rank.push_back(nlohmann::json::parse(text));
  for (const auto& [name, ours] : of_rank.front().items()) {
    std::map<std::string, std::vector<size_t>> ranks_with;
    for (size_t rank = 0; rank < of_rank.size(); ++rank)
      ranks_with[of_rank[rank].value(name, nlohmann::json()).dump()].push_back(rank);
    if (ranks_with.size() == 1) continue;
    std::vector<std::string> parts;
    for (const auto& [value, ranks] : ranks_with)
      parts.push_back(fmt::format("{} on rank{} {}", value, ranks.size() > 1 ? "s" : "", some_of(ranks)));
    throw CommonError(
        fmt::format("mixed versions or options among ranks: {} is {}: start all ranks with the same "
                    "command",
                    name, some_of(parts, " and ")));
  }
}

std::shared_ptr<ProcessGroup> join_patiently(const std::string& build) {
  constexpr std::chrono::milliseconds kPatience = std::chrono::days(30);
  std::shared_ptr<ProcessGroup> group =
      ProcessGroup::connect(ranks_from_environment(), {.timeout = kPatience});
  require_same_on_all_ranks(*group, {{"kiln", build}});
  return group;
}

void as_rank(ProcessGroup& group, const std::function<void()>& work) try {
  work();
} catch (const MissingRanks&) {
  throw;
} catch (const CommonError&) {
  throw;
} catch (const std::exception& error) {
  if (group.world_size() == 1) throw;
  group.report_failure(message_of(error));
  throw Error(fmt::format("rank {} of {}: {}", group.rank(), group.world_size(), message_of(error)));
}

}  // namespace kiln
