#include "core/cpu_level.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdlib>
#include <functional>

#include "core/error.h"

namespace kiln {
namespace {

// Runs `f` in a process of its own, with these variables: a level cannot be raised again.
void in_process(const std::vector<std::pair<const char*, const char*>>& variables,
                const std::function<bool()>& f) {
  EXPECT_EXIT(
      {
        for (const char* name : {"KILN_CPU", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"})
          ::unsetenv(name);
        for (const auto& [name, value] : variables) ::setenv(name, value, 1);
        std::exit(f() ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

std::string refusal() {
  try {
    lower_cpu_level();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool is_set(const char* name, std::string_view value) {
  const char* found = std::getenv(name);
  return found && found == value;
}

TEST(CpuLevel, KilnCpuLowersKernelsAndLibrariesTogether) {
  if (cpu_level_of_machine() < CpuLevel::kAvx2) GTEST_SKIP() << "this processor has no AVX2";
  in_process({{"KILN_CPU", "avx2"}, {"ONEDNN_MAX_CPU_ISA", "AVX512_CORE"}}, [] {
    lower_cpu_level();
    return cpu_level() == CpuLevel::kAvx2 && (hwy::SupportedTargets() & (HWY_AVX2 - 1)) == 0 &&
           (hwy::SupportedTargets() & HWY_AVX2) != 0 && is_set("ONEDNN_MAX_CPU_ISA", "AVX2") &&
           is_set("ATEN_CPU_CAPABILITY", "avx2");
  });
}

TEST(CpuLevel, WithoutKilnCpuTheMachinesLevelIsInUse) {
  in_process({}, [] {
    lower_cpu_level();
    return cpu_level() == cpu_level_of_machine() && !std::getenv("ONEDNN_MAX_CPU_ISA");
  });
  in_process({{"KILN_CPU", ""}}, [] { return refusal().empty(); });
}

TEST(CpuLevel, UnknownWordsAndLevelsThatTheMachineLacksAreOneLine) {
  in_process({{"KILN_CPU", "AVX2"}}, [] {
    return refusal() == "[cpu] KILN_CPU expects one of avx2, avx512, avx512_bf16, amx, got 'AVX2'";
  });
  if (cpu_level_of_machine() == CpuLevel::kAmx) return;
  in_process({{"KILN_CPU", "amx"}}, [] {
    return refusal() ==
           "[cpu] KILN_CPU=amx: this processor has no more than " + name_of(cpu_level_of_machine());
  });
}

TEST(CpuLevel, ALibraryAloneIsNotLowered) {
  for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"})
    in_process({{name, "AVX2"}}, [&] {
      return refusal() == std::string("[cpu] ") + name +
                              " is set, which lowers one library alone: unset it, or lower all with "
                              "KILN_CPU=avx2|avx512|avx512_bf16|amx";
    });
}

}  // namespace
}  // namespace kiln
