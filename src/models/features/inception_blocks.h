// The convolutions of the Inception network as data: torchvision's names, those of TensorFlow's graph, and
// the shapes. The network is built from it, and weights of the graph are renamed by it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

// Convolution without bias, batch norm, ReLU. Padded to the same size unless `padded` is false.
struct InceptionUnit {
  std::string name{};     // "branch5x5_1"
  std::string tf_name{};  // "tower/conv"
  int64_t in = 0, out = 0, kernel_h = 1, kernel_w = 1, stride = 1;
  bool padded = true;
};

// A chain of units; with `fork` its end goes through two more, whose outputs stand side by side.
struct InceptionBranch {
  std::vector<InceptionUnit> chain;
  std::vector<InceptionUnit> fork{};
};

// kMaxHalving: a pool of stride 2 alone. The others keep the size and feed a 1x1 unit.
enum class InceptionPool { kAverage, kMax, kMaxHalving };

struct InceptionBlock {
  std::string name{}, tf_name{};            // "Mixed_5b", "mixed"
  std::vector<InceptionBranch> branches{};  // concatenated in this order, then the pool's
  InceptionPool pool = InceptionPool::kAverage;
  std::vector<InceptionUnit> pool_unit{};  // one, or none
};

inline constexpr int64_t kInceptionWidth = 2048, kInceptionClasses = 1008;

const std::vector<InceptionUnit>& inception_stem();
const std::vector<InceptionBlock>& inception_blocks();

}  // namespace kiln
