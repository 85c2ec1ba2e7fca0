// The most memory that tensors take in the parts of a run outside the step: load, checkpoint, ...
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace kiln {

class PhaseMemory {
 public:
  explicit PhaseMemory(at::Device device) : device_(device) {}

  // A phase lasts while this lives; of several of the same name the highest peak counts. Not nested. On a CPU
  // it needs install_tracking_cpu_allocator().
  class Phase {
   public:
    Phase(PhaseMemory& memory, std::string name);
    ~Phase();
    Phase(const Phase&) = delete;

   private:
    PhaseMemory& memory_;
    std::string name_;
  };

  // Live bytes on the device at the peak of each phase so far.
  const std::map<std::string, int64_t>& peak_bytes() const { return peak_bytes_; }

 private:
  at::Device device_;
  std::map<std::string, int64_t> peak_bytes_;
};

}  // namespace kiln
