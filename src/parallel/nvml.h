// What the driver says about a GPU: NVML, loaded when it is there. Nothing links to it.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>

namespace kiln {

// A field is empty where the GPU or its driver does not tell.
struct GpuReading {
  std::optional<double> utilisation;    // share of the last moments in which a kernel ran, [0, 1]
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
