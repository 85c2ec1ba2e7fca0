#include "plan/this_machine.h"

#include <algorithm>
#include <cctype>

#include "core/error.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

// Letters and digits, in upper case.
std::string plain(const std::string& text) {
  std::string kept;
  for (char c : text)
    if (std::isalnum(static_cast<unsigned char>(c)))
      kept += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return kept;
}

// "A100-80G" -> A100 and 80G; the second is empty where a kind has one size only.
std::pair<std::string, std::string> kind_and_size(const std::string& profile_name) {
  const size_t dash = profile_name.rfind('-');
  if (dash == std::string::npos || !profile_name.ends_with("G")) return {profile_name, ""};
  return {profile_name.substr(0, dash), profile_name.substr(dash + 1)};
}

}  // namespace

std::optional<std::string> builtin_profile_named(const std::string& gpu_name) {
  const std::string wanted = plain(gpu_name);
  std::optional<std::string> found;
  for (const MachineProfile& profile : builtin_profiles()) {
    const auto [kind, size] = kind_and_size(profile.name);
    const size_t at = wanted.find(plain(kind));
    if (at == std::string::npos) continue;
    const size_t end = at + plain(kind).size();
    const bool whole = end == wanted.size() || kind.back() < '0' || kind.back() > '9' ||
                       std::isdigit(static_cast<unsigned char>(wanted[end])) == 0;  // T4 is not T400
    if (!whole) continue;
    if (!size.empty() && wanted.find(size) != std::string::npos) return profile.name;
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
