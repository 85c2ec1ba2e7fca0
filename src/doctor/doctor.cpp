#include "doctor/doctor.h"

#include <dlfcn.h>
#include <fmt/chrono.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include "core/control_groups.h"
#include "core/cpu_level.h"
#include "core/error.h"
#include "core/files/entries.h"
#include "core/files/file_system.h"
#include "core/memory_limits.h"
#include "core/tensors.h"
#include "core/units.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "plan/price/machine_profile.h"
#include "plan/price/this_machine.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;
using enum Diagnosis;

// Keeps the worst diagnosis of a finding, with the first advice for it.
void judge(MachineFinding& finding, Diagnosis diagnosis, bool holds, const std::string& advice) {
  if (!holds || diagnosis <= finding.diagnosis) return;
  finding.diagnosis = diagnosis;
  finding.advice = advice;
}

// Returns the first line of a small file, or "" if there is none.
std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<fs::path> sorted_entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  for (const auto& entry : readable_entries_of(folder)) entries.push_back(entry.path());
  std::ranges::sort(entries);
  return entries;
}

MachineFinding instructions() {
  const CpuLevel level = cpu_level(), best = cpu_level_of_machine();
  MachineFinding found{
      "instructions", machine_name(at::kCPU), {{"level", name_of(level)}, {"best", name_of(best)}}};
  judge(found, kGains, level < best, fmt::format("the processor has {}: unset KILN_CPU", name_of(best)));
  judge(found, kGains, best == CpuLevel::kPortable, "Kiln's kernels want AVX2 or later");
  return found;
}

MachineFinding threads(const fs::path& root) {
  const int64_t own = num_own_cpus(root.string()), all = ::sysconf(_SC_NPROCESSORS_ONLN);
  const double quota = cpu_quota(root.string()).value_or(static_cast<double>(all));
  const bool is_limited = quota < static_cast<double>(all) && std::ceil(quota) <= static_cast<double>(own);
  MachineFinding found{
      "threads",
      fmt::format("{} of {} processors", own, all),
      {{"own", own}, {"machine", all}, {"quota", std::min(quota, static_cast<double>(own))}}};
  judge(found, kGains, is_limited,
        fmt::format("a control group gives the time of {} processors, for {} threads: raise its limit",
                    number_text(quota, 3), own));
  judge(found, kGains, own < all && !is_limited, "a launcher or taskset allows some only: allow more");
  return found;
}

MachineFinding memory(const std::string& root) {
  const HostMemory host = host_memory(root);
  MachineFinding found{
      "memory",
      fmt::format("{} of {} GiB are free", gib_text(host.available_bytes), gib_text(host.total_bytes)),
      {{"total_bytes", host.total_bytes}, {"available_bytes", host.available_bytes}}};
  judge(found, kLacks, gib(host.available_bytes) < 1, "end other programs: 1 GiB is too little");
  return found;
}

MachineFinding disk(const char* about, const std::string& path, const std::vector<DiskSpeed>& measured) {
  const std::string folder = existing_folder(path);
  const FileSystem file_system = file_system_of(folder);
  std::error_code error;
  const fs::space_info space = fs::space(folder, error);
  const int64_t free_bytes = error ? 0 : static_cast<int64_t>(space.available);
  MachineFinding found{about,
                       fmt::format("{} has {} GiB free", folder, gib_text(free_bytes)),
                       {{"folder", folder}, {"file_system", file_system.name}, {"free_bytes", free_bytes}}};
  if (!file_system.name.empty()) found.text += " on " + file_system.name;
  if (const DiskSpeed* speed = disk_of(measured, folder)) {
    found.values["read_bytes_per_s"] = speed->read_bytes_per_s;
    found.text += fmt::format(", reads {} GB/s", number_text(speed->read_bytes_per_s / 1e9, 3));
  }
  judge(found, kLacks, ::access(folder.c_str(), W_OK) != 0, "it cannot be written to: choose another");
  judge(found, kLacks, gib(free_bytes) < 1, "remove something there: a small run takes 1 GiB");
  judge(found, kGains, file_system.is_network, "it waits for a network: keep stores on this machine");
  judge(found, kGains, file_system.name == "tmpfs", "it lies in memory: choose a folder on a disk");
  return found;
}

// Returns the version in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ...", or "" without it.
std::string nvidia_driver(const fs::path& root) {
  std::istringstream words(first_line(root / "proc/driver/nvidia/version"));
  for (std::string word; words >> word;)
    if (std::isdigit(static_cast<unsigned char>(word[0])) && word.find('.') != word.npos) return word;
  return "";
}

MachineFinding drivers(const fs::path& root, at::Device device) {
  const std::string driver = nvidia_driver(root);
  const bool is_for_gpus = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD) != nullptr;
  MachineFinding found{
      "drivers", "NVIDIA " + driver, {{"nvidia", driver}, {"program_for_gpus", is_for_gpus}}};
  if (device.is_cuda()) found.text += fmt::format(", {} x {}", num_devices(device), machine_name(device));
  if (driver.empty()) found.text = "none of a GPU: runs are on the CPU";
  judge(found, kGains, !driver.empty() && !is_for_gpus,
        "this program is for CPUs: build one by scripts/setup --cuda");
  judge(found, kLacks, !driver.empty() && is_for_gpus && !device.is_cuda(),
        "CUDA 13 finds no GPU: it needs driver 580 or later, and a GPU that CUDA_VISIBLE_DEVICES shows");
  return found;
}

// Networks that are up, with their speed where the card says it, and the lanes of GPUs.
MachineFinding links(const fs::path& root) {
  std::vector<std::string> up;
  for (const fs::path& network : sorted_entries_of(root / "sys/class/net")) {
    if (first_line(network / "operstate") != "up") continue;
    const auto megabits = static_cast<double>(whole_number(first_line(network / "speed")).value_or(0));
    up.push_back(network.filename().string());
    if (megabits > 0) up.back() += fmt::format(" {} Gbit/s", number_text(megabits / 1e3, 3));
  }
  MachineFinding found{"links", "no network that is up: ranks of this machine only", {{"networks", up}}};
  if (!up.empty()) found.text = fmt::format("{}", fmt::join(up, ", "));
  for (const fs::path& card : sorted_entries_of(root / "sys/bus/pci/devices")) {
    if (first_line(card / "vendor") != "0x10de" || !first_line(card / "class").starts_with("0x03")) continue;
    const std::string lanes = first_line(card / "current_link_width"),
                      most = first_line(card / "max_link_width"), slot = card.filename().string();
    found.text += fmt::format("; GPU {} has {} of {} PCIe lanes", slot, lanes, most);
    const auto now = whole_number(lanes);
    judge(found, kGains, now && now < whole_number(most), "lanes are missing: see the GPU's slot");
  }
  return found;
}

MachineFinding clock(const fs::path& root) {
  const std::time_t now = std::time(nullptr);
  const std::string source =
      first_line(root / "sys/devices/system/clocksource/clocksource0/current_clocksource");
  MachineFinding found{
      "clock", fmt::format("{:%Y-%m-%d %H:%M} UTC, by {}", fmt::gmtime(now), source), {{"source", source}}};
  struct stat program = {};
  const bool is_known = ::stat("/proc/self/exe", &program) == 0;
  judge(found, kLacks, is_known && static_cast<double>(program.st_mtime - now) > kSecondsPerDay,
        "it is before the day on which this program was made, so that downloads fail: set the clock");
  judge(found, kGains, source == "hpet" || source == "acpi_pm",
        "each reading takes microseconds: start the system with clocksource=tsc");
  return found;
}

MachineFinding locale() {
  std::string name;
  for (const char* variable : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (const char* value = std::getenv(variable); value && name.empty()) name = value;
  MachineFinding found{"locale", name.empty() ? "none is set" : name, {{"name", name}}};
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  judge(found, kGains, name.find("utf-8") == name.npos && name.find("utf8") == name.npos,
        "Kiln prints UTF-8: export LC_ALL=C.UTF-8");
  return found;
}

MachineFinding profile(const std::optional<MachineProfile>& machine) {
  const bool is_measured = machine && machine->measured;
  MachineFinding found{
      "profile", machine ? machine->source : "none for this GPU", {{"measured", is_measured}}};
  judge(found, kGains, !is_measured, "plans are estimates: kiln plan --calibrate measures");
  return found;
}

// Times square products of each dtype and keeps the best of five seconds.
MachineFinding peak(at::Device device) {
  constexpr double kSeconds = 5, kLeastShare = 0.5;  // of the data sheet
  apply({.device = device});
  const auto begin = std::chrono::steady_clock::now();
  const ProcessorTimes before = processor_times();
  std::map<at::ScalarType, double> flops = {{at::kFloat, 0}};
  if (device.is_cuda() || cpu_product_dtype(at::kBFloat16) != at::kFloat) flops[at::kBFloat16] = 0;
  do {
    for (auto& [dtype, best] : flops) best = std::max(best, measure_peak_flops(device, dtype));
  } while (elapsed_since(begin) < kSeconds);
  MachineFinding found{"peak", "products in TFLOP/s:"};
  for (const auto& [dtype, best] : flops) {
    const double sheet = data_sheet_flops(device, dtype, /*tf32=*/false);
    found.values[dtype_text(dtype) + "_flops"] = best;
    found.text += fmt::format(" {} {}", dtype_text(dtype), number_text(best / 1e12, 3));
    judge(found, kGains, best < kLeastShare * sheet,
          "it is less than half of the data sheet: look for other programs, heat and a power limit");
  }
  if (device.is_cuda()) return found;
  const double memory = estimate_cpu().memory_bytes_per_s,
               taken = taken_share(processor_times().since(before), processors_of(num_own_cpus()));
  found.values.update({{"memory_bytes_per_s", memory}, {"taken_share", taken}});
  found.text += fmt::format("; memory {} GB/s", number_text(memory / 1e9, 3));
  judge(found, kGains, !taken_text(taken).empty(), taken_text(taken) + " meanwhile: end them");
  return found;
}

}  // namespace

std::vector<MachineFinding> examine(const DoctorOptions& options) {
  const fs::path root = options.root.empty() ? "/" : options.root;
  const at::Device device = choose_device(DeviceChoice::kAuto);
  const std::optional<MachineProfile> machine = profile_of(device);
  const std::vector<DiskSpeed> disks = machine ? machine->disks : std::vector<DiskSpeed>();
  std::error_code error;
  const std::string temporary = fs::temp_directory_path(error).string();
  std::vector<MachineFinding> findings = {instructions(), threads(root), memory(options.root)};
  findings.push_back(disk("disk of runs", options.folder, disks));
  findings.push_back(disk("temporary disk", error ? "/tmp" : temporary, disks));
  for (const MachineFinding& other :
       {drivers(root, device), links(root), clock(root), locale(), profile(machine)})
    findings.push_back(other);
  if (options.measures_peak) findings.push_back(peak(device));
  return findings;
}

nlohmann::json to_json(const std::vector<MachineFinding>& findings) {
  Diagnosis worst = kHas;
  nlohmann::json list = nlohmann::json::array();
  for (const MachineFinding& finding : findings) {
    worst = std::max(worst, finding.diagnosis);
    list.push_back({{"about", finding.about},
                    {"diagnosis", choice_name(finding.diagnosis)},
                    {"text", finding.text},
                    {"advice", finding.advice},
                    {"values", finding.values}});
  }
  return {{"diagnosis", choice_name(worst)}, {"findings", std::move(list)}};
}

std::string findings_text(const std::vector<MachineFinding>& findings) {
  std::string text;
  for (const MachineFinding& finding : findings) {
    text += fmt::format("{:<6} {:<15} {}\n", choice_name(finding.diagnosis), finding.about, finding.text);
    if (!finding.advice.empty()) text += fmt::format("{:23}{}\n", "", finding.advice);
  }
  return text;
}

void check_nothing_lacks(const std::vector<MachineFinding>& findings) {
  const auto first = std::ranges::find(findings, kLacks, &MachineFinding::diagnosis);
  if (first != findings.end()) fail("doctor", "{}: {}", first->about, first->advice);
}

}  // namespace kiln
