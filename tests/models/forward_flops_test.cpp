#include "models/forward_flops.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace kiln {
namespace {

struct CountedPass {
  const char* model;
  ImageExtent image;
  double flops;
};

// Counted by hand from the models' papers: two for each multiply-add of the linear layers, convolutions and
// attention, with the sizes' embedder of PixArt-alpha and the denominators of Sana's linear attention.
TEST(ForwardFlops, AreThoseOfThePapers) {
  for (const CountedPass& pass : {CountedPass{"DiT-XL/2", {32, 32, 0}, 237242843136},
                                  {"DiT-S/2", {32, 32, 0}, 12111347712},
                                  {"PixArt-Sigma-XL/2-512", {64, 64, 300}, 1288698494976},
                                  {"PixArt-Sigma-XL/2-512", {64, 64, 77.5}, 1223539900416},
                                  {"PixArt-Sigma-XL/2-512", {48, 96, 10}, 1373066330112},
                                  {"PixArt-Sigma-XL/2-1024-KvCompress", {128, 128, 300}, 5821830955008},
                                  {"PixArt-Alpha-XL/2-1024", {128, 128, 120}, 6509523566592},
                                  {"Sana-600M", {32, 32, 300}, 1121422049280},
                                  {"Sana-600M", {16, 16, 0}, 258715975680},
                                  {"sd15", {64, 64, 77}, 803273441280},
                                  {"sd15", {40, 72, 10}, 535379737600}}) {
    ForwardFlops flops(pass.model, nullptr);
    EXPECT_DOUBLE_EQ(flops(pass.image), pass.flops)
        << pass.model << " at " << pass.image.height << " x " << pass.image.width;
  }
}

TEST(ForwardFlops, RefusesASizeThatTheModelDoesNotTake) {
  ForwardFlops flops("PixArt-Sigma-XL/2-256", {{"depth", 1}});
  EXPECT_THROW(flops({64, 64, 10}), Error);
  EXPECT_THROW(flops({64, 64, 10}), Error);
  EXPECT_GT(flops({32, 32, 10}), 0);
}

}  // namespace
}  // namespace kiln
