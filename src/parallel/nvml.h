// Asks the driver about a GPU through NVML, which is loaded at run time if it exists. Nothing links to it.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>

namespace kiln {

// A field is empty if the GPU or its driver does not report it.
struct GpuReading {
  std::optional<double> utilisation;    // share of the last moments with a kernel running, [0, 1]
  std::optional<double> watts;          // now
  std::optional<int64_t> memory_bytes;  // in use on the GPU, by all processes
  std::optional<int64_t> memory_total_bytes;
};

class Nvml {
 public:
  // Watches CUDA device `index` of this process. Null where there is no NVML or no such GPU.
  static std::unique_ptr<Nvml> open(int index);
  ~Nvml();
  Nvml(const Nvml&) = delete;

  GpuReading read() const;

 private:
  struct Library;
  explicit Nvml(std::unique_ptr<Library> library);
  std::unique_ptr<Library> library_;
};

}  // namespace kiln
