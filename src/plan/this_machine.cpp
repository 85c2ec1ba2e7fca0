#include "plan/this_machine.h"

#include <algorithm>
#include <cctype>
#include <utility>
#include <vector>

#include "core/error.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

// In upper case: "NVIDIA A100-SXM4-40GB" -> NVIDIA, A100, SXM4, 40GB.
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

// "A100-80G" -> A100 and 80G; the second is empty where a kind has one size only.
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
    if (std::ranges::search(words, words_of(kind)).empty()) continue;
    if (!size.empty() && std::ranges::find(words, size + "B") != words.end()) return profile.name;
    if (!found) found = profile.name;
  }
  return found;
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
