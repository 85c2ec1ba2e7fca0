// What torch's autograd engine does with the gradients that meet at one tensor: on devices it adds in place
// where it holds the only reference, on meta never (ATen counts meta among the tensor subclasses). A dry run
// has to add as the device does, or it sees tensors that no device has.
#pragma once
#include <cstdint>

namespace kiln {

// In scope, sums of this thread's engine on meta are in place where they are on a device.
class EngineSumsInPlace {
 public:
  EngineSumsInPlace();
  ~EngineSumsInPlace();
  EngineSumsInPlace(const EngineSumsInPlace&) = delete;

 private:
  uint64_t callback_;
};

}  // namespace kiln
