#include "core/cpu_level.h"

#include <fmt/ranges.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <vector>

#include "core/error.h"

namespace kiln {

namespace {

struct Level {
  CpuLevel level;
  std::vector<std::string> flags;  // of /proc/cpuinfo
  int64_t unused_targets;          // of Highway
  const char* aten;                // ATEN_CPU_CAPABILITY
  const char* onednn;              // ONEDNN_MAX_CPU_ISA
};

// From the least to the most. Highway's lower bits are better targets.
const std::vector<Level>& levels() {
  static const std::vector<Level> all = {
      {CpuLevel::kAvx2, {"avx2", "fma", "f16c", "bmi2"}, HWY_AVX2 - 1, "avx2", "AVX2"},
      {CpuLevel::kAvx512,
       {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
       HWY_AVX3 - 1,
       "avx512",
       "AVX512_CORE"},
      {CpuLevel::kAvx512Bf16, {"avx512_bf16", "avx512_vnni"}, 0, "avx512", "AVX512_CORE_BF16"},
      {CpuLevel::kAmx, {"amx_bf16", "amx_int8"}, 0, "avx512", "AVX512_CORE_AMX"}};
  return all;
}

std::set<std::string> processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line);
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

CpuLevel& level_in_use() {
  static CpuLevel level = cpu_level_of_machine();
  return level;
}

}  // namespace

CpuLevel cpu_level_of_machine() {
  static const CpuLevel best = [] {
    const std::set<std::string> has = processor_flags();
    CpuLevel found = CpuLevel::kPortable;
    for (const Level& level : levels()) {
      if (!std::all_of(level.flags.begin(), level.flags.end(),
                       [&](const std::string& flag) { return has.contains(flag); }))
        break;
      found = level.level;
    }
    return found;
  }();
  return best;
}

CpuLevel cpu_level() { return level_in_use(); }

bool rounds_bf16_at_once = cpu_level_of_machine() >= CpuLevel::kAvx512Bf16;

std::string name_of(CpuLevel level) { return level == CpuLevel::kPortable ? "x86-64" : choice_name(level); }

void lower_cpu_level() {
  const char* word = std::getenv("KILN_CPU");
  if (!word || !*word) {
    for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"})
      if (std::getenv(name))
        fail("cpu", "{} is set, which lowers one library alone: unset it, or lower all with KILN_CPU={}",
             name, fmt::join(choice_names<CpuLevel>(), "|"));
    return;
  }
  const CpuLevel wanted = parse_choice<CpuLevel>("cpu", "KILN_CPU", word);
  if (wanted > cpu_level_of_machine())
    fail("cpu", "KILN_CPU={}: this processor has no more than {}", word, name_of(cpu_level_of_machine()));
  const Level& level = *std::find_if(levels().begin(), levels().end(),
                                     [&](const Level& each) { return each.level == wanted; });
  level_in_use() = wanted;
  rounds_bf16_at_once = wanted >= CpuLevel::kAvx512Bf16;
  hwy::DisableTargets(level.unused_targets);
  ::setenv("ATEN_CPU_CAPABILITY", level.aten, /*overwrite=*/1);
  ::setenv("ONEDNN_MAX_CPU_ISA", level.onednn, /*overwrite=*/1);
}

}  // namespace kiln
