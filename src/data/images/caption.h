// What is said of a picture. Torch-free.
#pragma once
#include <string>

namespace kiln {

struct Caption {
  std::string text{};
  std::string kind{"caption"};  // where it comes from, or what the data set calls it
  float weight = 1;             // how often it is chosen in relation to the picture's others; not negative
};

}  // namespace kiln
