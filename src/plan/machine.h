// What a machine can do: the figures that prices come from. Vendor figures and measured ones are told apart.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kiln {

// One device and what it hangs on. Rates are per device: FLOP/s dense (no sparsity), bytes/s.
struct Machine {
  std::string name;
  bool measured = false;         // by --calibrate; otherwise the vendor's figures with the usual achievable shares
  bool is_cpu = false;
  int64_t memory_bytes = 0;      // of the device
  double bf16_flops = 0, fp16_flops = 0, f32_flops = 0, tf32_flops = 0;  // matrix products, peak
  double memory_bandwidth = 0;   // bytes/s, peak
  double host_link = 0;          // device to host, one direction
  double device_link = 0;        // to the next device in the node (NVLink, PCIe), one direction
  double network_link = 0;       // to another node, per device
  double disk_read = 0;

  // Share of the peaks that large shapes reach, and the fixed cost of one operation.
  double matmul_share = 0.75, attention_share = 0.45, bandwidth_share = 0.85;
  double seconds_per_op = 0;
  int64_t context_bytes = 0;     // what the driver and the libraries take before the first tensor
  bool has_bf16 = true;
};

// The built-in profiles; "cpu" is this machine's, measured or estimated.
const std::vector<Machine>& machine_profiles();
// Case and punctuation do not matter: "a100-80g", "RTX 4090". Throws Error with the closest names.
Machine find_machine(const std::string& name);

void to_json(nlohmann::json& json, const Machine& machine);
void from_json(const nlohmann::json& json, Machine& machine);

}  // namespace kiln
