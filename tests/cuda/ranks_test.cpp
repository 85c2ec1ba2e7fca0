// NCCL, as far as one GPU goes: a communicator of one rank runs every collective.
#include <gmock/gmock.h>

#include "cuda/gpu_test.h"
#include "parallel/offload/device_wait.h"
#include "parallel/offload/host_copy.h"
#include "parallel/rank_threads.h"

namespace kiln {
namespace {

using test::kGpu;
using CudaRanks = test::GpuTest;

TEST_F(CudaRanks, NcclRunsEveryCollective) {
  test::alone_connected(kGpu, [](const std::shared_ptr<ProcessGroup>& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const at::Tensor values = at::arange(64, at::TensorOptions(dtype).device(kGpu)),
                       out = at::zeros_like(values), kept = values.clone();
      group->all_reduce(values, "a").wait();
      EXPECT_TRUE(at::equal(values, kept));
      group->reduce_scatter(out, values, "b").wait();
      EXPECT_TRUE(at::equal(out, kept));
      out.zero_();
      group->all_gather(out, values, "c").wait();
      EXPECT_TRUE(at::equal(out, kept));
      group->sum_tensor(values, "d").wait();
      EXPECT_TRUE(at::equal(values, kept));
    }
    EXPECT_EQ(group->volume().all_reduced, 4 * 64);
    EXPECT_THAT(group->sum({3}, "host values"), ::testing::ElementsAre(3));
    const auto itself = group->subgroup("itself", {0});  // a communicator of its own
    const at::Tensor values = at::ones({8}, at::TensorOptions(kGpu));
    itself->all_reduce(values, "e").wait();
    EXPECT_EQ(values.sum().item<double>(), 8);
  });
}

TEST_F(CudaRanks, TheHostWaitsForTheDeviceWatched) {
  test::alone_connected(kGpu, [](const std::shared_ptr<ProcessGroup>& group) {
    at::Tensor product = at::ones({2048, 2048}, at::TensorOptions(kGpu));
    for (int i = 0; i < 20; ++i) product = at::matmul(product, product) / 2048;
    const HostRead read(product);
    ASSERT_TRUE(read.end().has_value());
    wait_for(*read.end(), *group, "some products");
    EXPECT_EQ(read.wait().max().item<double>(), 1);
  });
}

using CudaCopies = test::GpuTest;

TEST_F(CudaCopies, StagedReadsCopyEveryByte) {
  StagedRead staged(kGpu, /*buffer_bytes=*/1 << 16);
  for (const int64_t n : {1, 1 << 14, (1 << 14) + 1, 1000003}) {
    const at::Tensor values = at::arange(n, at::TensorOptions(kGpu).dtype(at::kFloat));
    const at::Tensor host = staged.read(values);
    EXPECT_TRUE(host.is_cpu() && !host.is_pinned());
    EXPECT_TRUE(at::equal(host, values.cpu())) << n;
  }
}

TEST_F(CudaCopies, WhatIsSentIsPinned) {
  const at::Tensor host = host_empty({1000}, at::kFloat, kGpu);
  EXPECT_TRUE(host.is_pinned());
  host.fill_(3);
  EXPECT_EQ(sent_to(host, kGpu).sum().item<double>(), 3000);
}

}  // namespace
}  // namespace kiln
