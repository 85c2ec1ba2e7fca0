// Torch's autograd engine adds the gradients that meet at one tensor. On devices it adds in place where it
// holds the only reference. On meta it never does, because ATen counts meta among the tensor subclasses. A
// dry run has to add as the device does, or it sees tensors that no device has.
#pragma once
#include <cstdint>

namespace kiln {

// While one is in scope, this thread's engine adds on meta in place wherever it would on a device.
class EngineSumsInPlace {
 public:
  EngineSumsInPlace();
  ~EngineSumsInPlace();
  EngineSumsInPlace(const EngineSumsInPlace&) = delete;

 private:
  uint64_t callback_;
};

}  // namespace kiln
