#include "models/features/inception_blocks.h"

#include <fmt/format.h>

namespace kiln {
namespace {

using Unit = InceptionUnit;
using Branch = InceptionBranch;
using Block = InceptionBlock;

struct Kernel {
  int64_t height, width, out, stride = 1;
};
// Makes a chain of units named NAME_1, NAME_2, ...
std::vector<Unit> chain(const std::string& name, const std::string& tower, int64_t in,
                        const std::vector<Kernel>& kernels) {
  std::vector<Unit> units;
  for (size_t i = 0; i < kernels.size(); ++i) {
    const Kernel& kernel = kernels[i];
    units.push_back({.name = fmt::format("{}_{}", name, i + 1),
                     .tf_name = i == 0 ? tower + "/conv" : fmt::format("{}/conv_{}", tower, i),
                     .in = in,
                     .out = kernel.out,
                     .kernel_h = kernel.height,
                     .kernel_w = kernel.width,
                     .stride = kernel.stride,
                     .padded = kernel.stride == 1});
    in = kernel.out;
  }
  return units;
}

Unit unit_1x1(const std::string& name, const std::string& tf_name, int64_t in, int64_t out) {
  return {.name = name, .tf_name = tf_name, .in = in, .out = out};
}

Block block_a(const std::string& name, const std::string& tf_name, int64_t in, int64_t pool_width) {
  return {.name = name,
          .tf_name = tf_name,
          .branches = {{.chain = {unit_1x1("branch1x1", "conv", in, 64)}},
                       {.chain = chain("branch5x5", "tower", in, {{1, 1, 48}, {5, 5, 64}})},
                       {.chain = chain("branch3x3dbl", "tower_1", in, {{1, 1, 64}, {3, 3, 96}, {3, 3, 96}})}},
          .pool_unit = {unit_1x1("branch_pool", "tower_2/conv", in, pool_width)}};
}

Block block_b(const std::string& name, const std::string& tf_name, int64_t in) {
  const Unit halving = {.name = "branch3x3",
                        .tf_name = "conv",
                        .in = in,
                        .out = 384,
                        .kernel_h = 3,
                        .kernel_w = 3,
                        .stride = 2,
                        .padded = false};
  return {
      .name = name,
      .tf_name = tf_name,
      .branches = {{.chain = {halving}},
                   {.chain = chain("branch3x3dbl", "tower", in, {{1, 1, 64}, {3, 3, 96}, {3, 3, 96, 2}})}},
      .pool = InceptionPool::kMaxHalving};
}

Block block_c(const std::string& name, const std::string& tf_name, int64_t width) {
  constexpr int64_t kIn = 768, kOut = 192;
  return {
      .name = name,
      .tf_name = tf_name,
      .branches = {{.chain = {unit_1x1("branch1x1", "conv", kIn, kOut)}},
                   {.chain = chain("branch7x7", "tower", kIn, {{1, 1, width}, {1, 7, width}, {7, 1, kOut}})},
                   {.chain =
                        chain("branch7x7dbl", "tower_1", kIn,
                              {{1, 1, width}, {7, 1, width}, {1, 7, width}, {7, 1, width}, {1, 7, kOut}})}},
      .pool_unit = {unit_1x1("branch_pool", "tower_2/conv", kIn, kOut)}};
}

Block block_d(const std::string& name, const std::string& tf_name, int64_t in) {
  return {.name = name,
          .tf_name = tf_name,
          .branches = {{.chain = chain("branch3x3", "tower", in, {{1, 1, 192}, {3, 3, 320, 2}})},
                       {.chain = chain("branch7x7x3", "tower_1", in,
                                       {{1, 1, 192}, {1, 7, 192}, {7, 1, 192}, {3, 3, 192, 2}})}},
          .pool = InceptionPool::kMaxHalving};
}

std::vector<Unit> fork(const std::string& name, const std::string& tower) {
  constexpr int64_t kWidth = 384;
  return {
      {.name = name + "a", .tf_name = tower + "/mixed/conv", .in = kWidth, .out = kWidth, .kernel_w = 3},
      {.name = name + "b", .tf_name = tower + "/mixed/conv_1", .in = kWidth, .out = kWidth, .kernel_h = 3}};
}

Block block_e(const std::string& name, const std::string& tf_name, int64_t in, InceptionPool pool) {
  return {.name = name,
          .tf_name = tf_name,
          .branches = {{.chain = {unit_1x1("branch1x1", "conv", in, 320)}},
                       {.chain = chain("branch3x3", "tower", in, {{1, 1, 384}}),
                        .fork = fork("branch3x3_2", "tower")},
                       {.chain = chain("branch3x3dbl", "tower_1", in, {{1, 1, 448}, {3, 3, 384}}),
                        .fork = fork("branch3x3dbl_3", "tower_1")}},
          .pool = pool,
          .pool_unit = {unit_1x1("branch_pool", "tower_2/conv", in, 192)}};
}

}  // namespace

const std::vector<Unit>& inception_stem() {
  static const std::vector<Unit> stem = {{"Conv2d_1a_3x3", "conv", 3, 32, 3, 3, 2, false},
                                         {"Conv2d_2a_3x3", "conv_1", 32, 32, 3, 3, 1, false},
                                         {"Conv2d_2b_3x3", "conv_2", 32, 64, 3, 3, 1, true},
                                         {"Conv2d_3b_1x1", "conv_3", 64, 80, 1, 1, 1, false},
                                         {"Conv2d_4a_3x3", "conv_4", 80, 192, 3, 3, 1, false}};
  return stem;
}

const std::vector<Block>& inception_blocks() {
  static const std::vector<Block> blocks = {block_a("Mixed_5b", "mixed", 192, 32),
                                            block_a("Mixed_5c", "mixed_1", 256, 64),
                                            block_a("Mixed_5d", "mixed_2", 288, 64),
                                            block_b("Mixed_6a", "mixed_3", 288),
                                            block_c("Mixed_6b", "mixed_4", 128),
                                            block_c("Mixed_6c", "mixed_5", 160),
                                            block_c("Mixed_6d", "mixed_6", 160),
                                            block_c("Mixed_6e", "mixed_7", 192),
                                            block_d("Mixed_7a", "mixed_8", 768),
                                            block_e("Mixed_7b", "mixed_9", 1280, InceptionPool::kAverage),
                                            block_e("Mixed_7c", "mixed_10", 2048, InceptionPool::kMax)};
  return blocks;
}

}  // namespace kiln
