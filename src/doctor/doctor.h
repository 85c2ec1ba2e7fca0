// What a machine has for Kiln, what it lacks, and what would make runs on it faster: kiln doctor.
#pragma once
#include <string>
#include <vector>

#include "core/choices.h"
#include "core/json.h"

namespace kiln {

enum class Diagnosis {
  kHas,    // nothing to do
  kGains,  // runs would be faster or safer with the advice
  kLacks,  // runs fail without it
};
template <>
struct Choices<Diagnosis> {
  static constexpr std::pair<Diagnosis, const char*> kAll[] = {
      {Diagnosis::kHas, "has"}, {Diagnosis::kGains, "gains"}, {Diagnosis::kLacks, "lacks"}};
};

struct MachineFinding {
  std::string about;        // "threads"
  std::string text;         // what is there
  nlohmann::json values{};  // the same for programs: counts, bytes, FLOP/s
  Diagnosis diagnosis = Diagnosis::kHas;
  std::string advice{};  // what to change; empty for kHas
};

struct DoctorOptions {
  std::string folder = ".";   // where runs will be written
  bool measures_peak = true;  // products and copies, for five seconds
  std::string root{};         // the folder of proc and sys, if not /
};

// Looks at the machine without changing it: instructions, threads, memory, disks, drivers, links, clock,
// locale, the machine's profile and, if asked for, its peak.
std::vector<MachineFinding> examine(const DoctorOptions& options);

// {"diagnosis": the worst, "findings": [{"about", "diagnosis", "text", "advice", "values"}]}.
nlohmann::json to_json(const std::vector<MachineFinding>& findings);
// A line for each finding, and an indented one for its advice.
std::string findings_text(const std::vector<MachineFinding>& findings);
// Throws Error naming the first finding that lacks something, if there is one.
void check_nothing_lacks(const std::vector<MachineFinding>& findings);

}  // namespace kiln
