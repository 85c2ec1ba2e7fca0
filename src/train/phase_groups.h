// The phases of a step as people read them: in the progress line and in the report.
#pragma once
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

namespace kiln {

struct PhaseGroup {
  const char* name;
  const char* color;                // in plots
  std::vector<const char*> phases;  // their names in log.jsonl's phase_s

  // Of one step's or line's phase_s.
  double seconds(const nlohmann::json& phase_s) const;
};

// Every phase of a step is in one of them.
std::span<const PhaseGroup> phase_groups();

}  // namespace kiln
