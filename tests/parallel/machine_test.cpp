#include "parallel/machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/aten.h"
#include "parallel/offload/host_copy.h"
#include "parallel/offload/host_memory.h"
#include "test_files.h"

namespace kiln {
namespace {

// An environment variable while this lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    if (value)
      setenv(name, value, 1);
    else
      unsetenv(name);
  }
  ~Variable() {
    if (before_.empty())
      unsetenv(name_);
    else
      setenv(name_, before_.c_str(), 1);
  }

 private:
  const char* name_;
  std::string before_;
};

TEST(Machine, LocalRanksHaveAGpuEach) {
  {
    const Variable none("CUDA_VISIBLE_DEVICES", nullptr);
    EXPECT_EQ(gpu_of_rank(0, 1), 0);
    EXPECT_EQ(gpu_of_rank(3, 4), 3);
    EXPECT_THAT([] { gpu_of_rank(1, 1); }, ThrowsMessage<Error>(has_all("local rank 1", "found 1")))
        << "two ranks on the one GPU of a machine";
  }
  // srun --gpus-per-task=1: every rank sees its own, as number 0.
  const Variable one("CUDA_VISIBLE_DEVICES", "2");
  EXPECT_EQ(gpu_of_rank(3, 1), 0);
  EXPECT_THROW(gpu_of_rank(4, 2), Error);
}

// Products and convolutions alike. Torch refuses to say when its two ways to set this disagree.
TEST(Machine, Tf32IsForAllOrNone) {
  at::Context& context = at::globalContext();
  const std::string before =
      context.float32MatmulPrecision() == at::Float32MatmulPrecision::MEDIUM ? "medium" : "highest";
  for (const bool allowed : {true, false}) {
    allow_tf32(allowed);
    EXPECT_EQ(context.allowTF32CuBLAS(), allowed);
    EXPECT_EQ(context.allowTF32CuDNN(at::Float32Op::CONV), allowed);
    EXPECT_EQ(context.allowTF32CuDNN(), allowed);
  }
  context.setFloat32MatmulPrecision(before);
}

TEST(Machine, MeasuresItsPeak) { EXPECT_GT(measure_peak_flops(at::kCPU, at::kFloat), 1e8); }

std::vector<std::string> calls;

PagePinning pinning_that_returns(int error) {
  calls.clear();
  static int result;
  result = error;
  return {.pin =
              [](void*, size_t bytes, unsigned) {
                calls.push_back("pin " + std::to_string(bytes));
                return result;
              },
          .finish_copies =
              [] {
                calls.emplace_back("finish");
                return 0;
              },
          .unpin =
              [](void*) {
                calls.emplace_back("unpin");
                return 0;
              }};
}

TEST(PinnedMemory, IsOfTheSizeAskedForAndLetGoAfterTheLastCopy) {
  constexpr size_t kBytes = (1 << 20) + 4100;
  {
    const at::DataPtr memory = pinned_zeros(kBytes, pinning_that_returns(0));
    auto* bytes = static_cast<char*>(memory.get());
    EXPECT_EQ(std::count(bytes, bytes + kBytes, 0), kBytes);
    std::memset(bytes, 1, kBytes);
  }
  EXPECT_THAT(calls, ElementsAre("pin " + std::to_string(kBytes), "finish", "unpin"));
  EXPECT_EQ(pinned_zeros(0, pinning_that_returns(0)).get(), nullptr);
  EXPECT_TRUE(calls.empty());
}

TEST(PinnedMemory, SaysWhatCouldNotBePinned) {
  EXPECT_THAT([] { pinned_zeros(3 << 20, pinning_that_returns(2)); },
              ThrowsMessage<Error>(has_all("0.00 GiB", "error 2")));
  EXPECT_THAT(calls, ElementsAre("pin 3145728"));
  EXPECT_THROW(pinned_zeros(1, {}), Error);
  EXPECT_ERROR(pinned_zeros(size_t{1} << 60, pinning_that_returns(0)), "has no 1073741824.00 GiB");
}

// Products accumulate in f32 however cuBLAS divides them; torch's default allows less.
TEST(Machine, PartsOfProductsAreAddedInF32) {
  apply({.device = at::kCPU, .threads = 1});
  const at::Context& context = at::globalContext();
  using Option = at::CuBLASReductionOption;
  EXPECT_EQ(context.allowBF16ReductionCuBLAS(), Option::DisallowReducedPrecisionAllowSplitK);
  EXPECT_EQ(context.allowFP16ReductionCuBLAS(), Option::DisallowReducedPrecisionAllowSplitK);
}

// In pieces, whole ones and a rest, of any dtype.
TEST(HostCopy, StagedReadsCopyEveryByte) {
  StagedRead staged(at::kCPU, /*buffer_bytes=*/64);
  for (const int64_t n : {0, 1, 16, 17, 32, 1000})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const at::Tensor from = at::arange(n, at::TensorOptions(dtype)) + 1;
      const at::Tensor host = staged.read(from);
      EXPECT_TRUE(at::equal(host, from)) << n;
      EXPECT_TRUE(n == 0 || host.const_data_ptr() != from.const_data_ptr());
    }
}

TEST(HostCopy, OnACpuNothingIsCopied) {
  const at::Tensor values = at::ones({3});
  const HostRead read(values);
  EXPECT_TRUE(read.is_pending());
  EXPECT_FALSE(read.end().has_value());
  EXPECT_TRUE(read.wait().is_same(values));
  EXPECT_FALSE(HostRead().is_pending());
}

}  // namespace
}  // namespace kiln
