// What a rank throws that waited for others in vain.
#pragma once
#include "core/error.h"

namespace kiln {

// A collective did not come about: others are missing.
class MissingRanks : public Error {
 public:
  using Error::Error;
};

}  // namespace kiln
