#include "plan/price/machine_profile.h"

#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/memory_limits.h"
#include "core/tensors.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

constexpr const char* kThisCpu = "cpu";
constexpr const char* kWho = "profile";

// Returns the letters and digits, in lower case.
std::string plain(const std::string& name) {
  std::string plain;
  for (const unsigned char c : name)
    if (std::isalnum(c)) plain += static_cast<char>(std::tolower(c));
  return plain;
}

MachineProfile read_profile(const fs::path& path) {
  const nlohmann::json json = read_json_or_discarded(kWho, path.string());
  if (!json.is_object())
    fail(kWho, "expected a JSON object in {}: remove it, or calibrate again", path.string());
  try {
    return profile_from_json(json);
  } catch (const Error& error) {
    fail(kWho, "{} ({}): remove it, or calibrate again", error.what(), path.string());
  }
}

std::vector<MachineProfile> stored_profiles() {
  std::vector<fs::path> paths;
  for (const auto& entry : readable_entries_of(profiles_folder()))
    if (entry.path().extension() == ".json") paths.push_back(entry.path());
  std::ranges::sort(paths);
  std::vector<MachineProfile> profiles;
  profiles.reserve(paths.size());
  for (const fs::path& path : paths) profiles.push_back(read_profile(path));
  return profiles;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

template <class T>
T field(const nlohmann::json& json, const char* name) {
  if (!json.contains(name)) fail(kWho, "a machine profile without '{}'", name);
  try {
    return json.at(name).get<T>();
  } catch (const nlohmann::json::exception&) {
    fail(kWho, "a machine profile whose '{}' is {}", name, brief(json.at(name)));
  }
}

// Visits the plain numbers of a profile, by name.
template <class Profile, class Visitor>
void visit_numbers(Profile& p, Visitor&& visit) {
  visit("memory_bytes", p.memory_bytes);
  visit("context_bytes", p.context_bytes);
  visit("workspace_bytes", p.workspace_bytes);
  visit("tf32_flops", p.tf32_flops);
  visit("memory_bytes_per_s", p.memory_bytes_per_s);
  visit("op_overhead_s", p.op_overhead_s);
  visit("host_link_bytes_per_s", p.host_link_bytes_per_s);
  visit("peer_bytes_per_s", p.peer_bytes_per_s);
  visit("rank_hop_s", p.rank_hop_s);
  visit("switch_sum_bytes_per_s", p.switch_sum_bytes_per_s);
  visit("network_bytes_per_s", p.network_bytes_per_s);
  visit("disk_bytes_per_s", p.disk_bytes_per_s);
  visit("gpus_per_node", p.gpus_per_node);
  visit("num_processors", p.num_processors);
  visit("watts", p.watts);
  visit("matmul_efficiency", p.matmul_efficiency);
  visit("attention_efficiency", p.attention_efficiency);
  visit("bandwidth_efficiency", p.bandwidth_efficiency);
}

// Returns a profile with today's keys. Older ones have the network's share of one GPU, and nothing of how the
// ranks of a CPU reach each other.
nlohmann::json in_present_keys(nlohmann::json json) {
  if (!json.contains("node_bytes_per_s") || json.contains("network_bytes_per_s")) return json;
  const bool is_cpu = field<std::string>(json, "device") == "cpu";
  json["network_bytes_per_s"] =
      is_cpu ? 0 : field<double>(json, "node_bytes_per_s") * field<double>(json, "gpus_per_node");
  json["switch_sum_bytes_per_s"] = 0;
  json["rank_hop_s"] = is_cpu ? kRankHop : 0;
  if (is_cpu) json["peer_bytes_per_s"] = kRankShare * field<double>(json, "memory_bytes_per_s");
  return json;
}

}  // namespace

MachineProfile find_profile(const std::string& name) {
  const std::string wanted = plain(name), this_machine = machine_name(at::kCPU);
  const bool wants_cpu = wanted == kThisCpu;
  std::vector<std::string> names{kThisCpu};
  for (MachineProfile& profile : stored_profiles()) {
    const bool is_cpu = profile.device == DryRunDevice::kCpu;
    if (wants_cpu ? is_cpu && profile.machine == this_machine : !is_cpu && plain(profile.name) == wanted) {
      if (is_cpu) profile.memory_bytes = host_memory().total_bytes;  // its limits may have changed
      if (has_clock(profile)) profile.speed = speed_of(profile.clock, present_readings(at::kCPU));
      return profile;
    }
    if (!is_cpu) names.push_back(profile.name);
  }
  if (wants_cpu) return estimate_cpu();
  for (const MachineProfile& profile : builtin_profiles()) {
    if (plain(profile.name) == wanted) return profile;
    names.push_back(profile.name);
  }
  fail(kWho,
       "no GPU is called '{}': the nearest are {} (kiln plan --help lists all); another card is planned by "
       "its memory, with --gpu-memory 10G in place of --gpu",
       name, fmt::join(nearest_names(name, names, 3), ", "));
}

MachineProfile with_disks_of(MachineProfile profile, const std::string& data, const std::string& offloaded) {
  if (const DiskSpeed* disk = disk_of(profile.disks, data)) profile.disk_bytes_per_s = disk->read_bytes_per_s;
  // State is written as much as it is read.
  if (const DiskSpeed* disk = disk_of(profile.disks, offloaded); disk && disk->write_bytes_per_s > 0)
    profile.offload_disk_bytes_per_s = 2 / (1 / disk->read_bytes_per_s + 1 / disk->write_bytes_per_s);
  return profile;
}

bool has_clock(const MachineProfile& profile) {
  return profile.device == DryRunDevice::kCpu && profile.clock.product_s > 0 &&
         at::get_num_threads() >= num_own_cpus();
}

MachineProfile with_tf32(MachineProfile profile) {
  if (profile.tf32_flops <= 0) return profile;
  profile.peak_flops[at::kFloat] = profile.tf32_flops;
  profile.operations = {};  // measured without TF32
  return profile;
}

void check_dtype(const MachineProfile& machine, at::ScalarType compute_dtype) {
  if (machine.peak_flops.contains(compute_dtype)) return;
  std::vector<std::string> known;
  for (const auto& [dtype, flops] : machine.peak_flops) known.push_back(dtype_text(dtype));
  fail("plan", "{} multiplies in {}, not in {}: choose --compute-dtype {}", machine.name,
       fmt::join(known, " and "), dtype_text(compute_dtype),
       machine.peak_flops.contains(at::kHalf) ? "fp16" : known.front());
}

nlohmann::json to_json(const MachineProfile& profile) {
  nlohmann::json json = {{"name", profile.name},
                         {"source", profile.source},
                         {"machine", profile.machine},
                         {"measured", profile.measured},
                         {"device", profile.device == DryRunDevice::kCpu ? "cpu" : "cuda"}};
  for (const auto& [dtype, flops] : profile.peak_flops) json["peak_flops"][dtype_text(dtype)] = flops;
  visit_numbers(profile, [&](const char* name, const auto& value) { json[name] = value; });
  json["rates"] = nlohmann::json::object();
  for (const auto& [key, points] : profile.rates)
    for (const RatePoint& p : points) json["rates"][key].push_back({p.work, p.seconds, p.m, p.n, p.k});
  if (!profile.operations.empty()) json["operations"] = profile.operations.to_json();
  for (const DiskSpeed& disk : profile.disks)
    json["disks"].push_back({{"folder", disk.folder},
                             {"file_system", disk.file_system},
                             {"read_bytes_per_s", disk.read_bytes_per_s},
                             {"write_bytes_per_s", disk.write_bytes_per_s}});
  if (profile.decoding.is_measured) {
    const auto pair = [](const PictureRate& rate) { return nlohmann::json{rate.fixed_s, rate.pixel_s}; };
    for (const auto& [format, rate] : profile.decoding.formats)
      json["decoding"][choice_name(format)] = pair(rate);
    json["decoding"]["halve"] = pair(profile.decoding.halve);
    json["decoding"]["crop"] = pair(profile.decoding.crop);
  }
  if (profile.clock.product_s > 0) json["clock"] = {profile.clock.product_s, profile.clock.copy_s};
  return json;
}

MachineProfile profile_from_json(const nlohmann::json& stored) {
  const nlohmann::json json = in_present_keys(stored);
  MachineProfile profile;
  profile.name = field<std::string>(json, "name");
  profile.source = field<std::string>(json, "source");
  profile.machine = field<std::string>(json, "machine");
  profile.measured = field<bool>(json, "measured");
  profile.device = field<std::string>(json, "device") == "cpu" ? DryRunDevice::kCpu : DryRunDevice::kCuda;
  for (const auto& [dtype, flops] : field<std::map<std::string, double>>(json, "peak_flops"))
    profile.peak_flops[dtype == "fp8" ? at::kFloat8_e4m3fn : parse_compute_dtype(dtype)] = flops;
  visit_numbers(profile, [&](const char* name, auto& value) {
    value = field<std::remove_cvref_t<decltype(value)>>(json, name);
  });
  using Point = std::tuple<double, double, int64_t, int64_t, int64_t>;
  for (const auto& [key, points] : field<std::map<std::string, std::vector<Point>>>(json, "rates"))
    for (const auto& [work, seconds, m, n, k] : points)
      profile.rates[key].push_back({work, seconds, m, n, k});
  // Older profiles have none of these.
  if (json.contains("disks"))
    for (const nlohmann::json& disk : json.at("disks"))
      profile.disks.push_back({.folder = field<std::string>(disk, "folder"),
                               .file_system = field<std::string>(disk, "file_system"),
                               .read_bytes_per_s = field<double>(disk, "read_bytes_per_s"),
                               .write_bytes_per_s = field<double>(disk, "write_bytes_per_s")});
  if (json.contains("decoding")) {
    const auto rate_of = [&](const std::string& name) {
      const auto [fixed_s, pixel_s] = field<std::pair<double, double>>(json.at("decoding"), name.c_str());
      return PictureRate{.fixed_s = fixed_s, .pixel_s = pixel_s};
    };
    for (auto& [format, rate] : profile.decoding.formats) rate = rate_of(choice_name(format));
    profile.decoding.crop = rate_of("crop");
    if (json.at("decoding").contains("halve")) profile.decoding.halve = rate_of("halve");
    profile.decoding.is_measured = true;
  }
  if (json.contains("operations")) profile.operations = OperationTable::from_json(json.at("operations"));
  if (json.contains("clock"))
    std::tie(profile.clock.product_s, profile.clock.copy_s) = field<std::pair<double, double>>(json, "clock");
  return profile;
}

std::string profiles_folder() {
  if (const std::string folder = environment("KILN_PROFILES"); !folder.empty()) return folder;
  if (const std::string config = environment("XDG_CONFIG_HOME"); !config.empty())
    return config + "/kiln/profiles";
  return environment("HOME") + "/.config/kiln/profiles";
}

std::string store_profile(const MachineProfile& profile) {
  const fs::path folder = profiles_folder();
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    fail(kWho, "cannot create {}: {} (KILN_PROFILES names another folder)", folder.string(), error.message());
  // Many machines may share a home folder.
  const std::string path = folder / (plain(profile.name + profile.machine) + ".json");
  write_file_atomically(kWho, path, to_json(profile).dump(1) + "\n");
  return path;
}

}  // namespace kiln
