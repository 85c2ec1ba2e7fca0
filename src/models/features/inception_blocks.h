// The convolutions of the Inception network as data: torchvision's names, the names in TensorFlow's graph,
// and shapes. This table builds the network and renames weights of the graph.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

// A convolution without bias, batch norm and ReLU. It keeps the size unless `padded` is false.
struct InceptionUnit {
  std::string name{};     // "branch5x5_1"
  std::string tf_name{};  // "tower/conv"
  int64_t in = 0, out = 0, kernel_h = 1, kernel_w = 1, stride = 1;
  bool padded = true;
};

// A chain of units. With `fork` its output goes through two more units, whose outputs are concatenated.
struct InceptionBranch {
  std::vector<InceptionUnit> chain;
  std::vector<InceptionUnit> fork{};
};

// kMaxHalving is a pool of stride 2 without a unit. The others keep the size and feed a 1x1 unit.
enum class InceptionPool { kAverage, kMax, kMaxHalving };

struct InceptionBlock {
  std::string name{}, tf_name{};            // "Mixed_5b", "mixed"
  std::vector<InceptionBranch> branches{};  // concatenated in this order; the pool comes last
  InceptionPool pool = InceptionPool::kAverage;
  std::vector<InceptionUnit> pool_unit{};  // one unit or none
};

inline constexpr int64_t kInceptionWidth = 2048, kInceptionClasses = 1008;

const std::vector<InceptionUnit>& inception_stem();
const std::vector<InceptionBlock>& inception_blocks();

}  // namespace kiln
