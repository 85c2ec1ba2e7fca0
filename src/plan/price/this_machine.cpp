#include "plan/price/this_machine.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cctype>
#include <utility>
#include <vector>

#include "core/error.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

// Splits a name into words in upper case: "NVIDIA A100-SXM4-40GB" -> NVIDIA, A100, SXM4, 40GB.
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  for (const char c : name) {
    const auto letter = static_cast<unsigned char>(c);
    if (std::isalnum(letter))
      words.back() += static_cast<char>(std::toupper(letter));
    else if (!words.back().empty())
      words.emplace_back();
  }
  return words;
}

// Splits "A100-80G" into A100 and 80G. The second is empty if the kind has only one size.
std::pair<std::string, std::string> kind_and_size(const std::string& profile_name) {
  const size_t dash = profile_name.rfind('-');
  if (dash == std::string::npos || !profile_name.ends_with("G")) return {profile_name, ""};
  return {profile_name.substr(0, dash), profile_name.substr(dash + 1)};
}

}  // namespace

std::optional<std::string> builtin_profile_named(const std::string& gpu_name) {
  const std::vector<std::string> words = words_of(gpu_name);
  std::optional<std::string> found;
  for (const MachineProfile& profile : builtin_profiles()) {
    const auto [kind, size] = kind_and_size(profile.name);
    const std::vector<std::string> wanted = words_of(kind);
    if (std::search(words.begin(), words.end(), wanted.begin(), wanted.end()) == words.end()) continue;
    if (!size.empty() && std::ranges::find(words, size + "B") != words.end()) return profile.name;
    if (!found) found = profile.name;
  }
  return found;
}

int64_t num_devices(at::Device device) {
  return device.is_cuda() ? static_cast<int64_t>(at::accelerator::deviceCount()) : 1;
}

int64_t planned_gpus(int64_t present, int64_t global_batch) {
  int64_t gpus = std::max<int64_t>(1, present);
  while (global_batch % gpus != 0) --gpus;
  return gpus;
}

double data_sheet_flops(const std::string& gpu_name, at::ScalarType compute_dtype, bool tf32) {
  const std::optional<std::string> name = builtin_profile_named(gpu_name);
  const auto profile =
      name ? std::ranges::find(builtin_profiles(), *name, &MachineProfile::name) : builtin_profiles().end();
  if (profile == builtin_profiles().end()) return 0;
  if (tf32 && compute_dtype == at::kFloat) return profile->tf32_flops;
  const auto peak = profile->peak_flops.find(compute_dtype);
  return peak == profile->peak_flops.end() ? 0 : peak->second;
}

double data_sheet_flops(at::Device device, at::ScalarType compute_dtype, bool tf32) {
  return device.is_cuda() ? data_sheet_flops(machine_name(device), compute_dtype, tf32) : 0;
}

std::optional<MachineProfile> profile_of(at::Device device) {
  if (device.is_cpu()) return find_profile("cpu");
  const std::string name = machine_name(device);
  try {
    return find_profile(name);  // a calibrated one
  } catch (const Error&) {
    const auto builtin = builtin_profile_named(name);
    return builtin ? std::optional(find_profile(*builtin)) : std::nullopt;
  }
}

}  // namespace kiln
