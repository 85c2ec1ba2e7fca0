#include "parallel/zero/flat_unit.h"
#include "core/aten.h"
#include "test_files.h"

namespace kiln {
namespace {

FlatUnit make_unit(at::ScalarType compute_dtype) {
  FlatLayout layout;
  layout.add("weight", {3, 5});
  layout.add("scalar", {});
  layout.add("bias", {7});
  return FlatUnit("unit", layout,
                  {.compute_dtype = compute_dtype, .moments = {{.name = "a"}, {.name = "b"}}, .num_emas = 2});
}

TEST(FlatUnit, SlotsAreAlignedViewsInEveryDtype) {
  FlatUnit unit = make_unit(at::kBFloat16);
  EXPECT_EQ(unit.layout().size, 96);
  for (const at::Tensor& buffer :
       {unit.compute_weights, unit.grads, unit.master, unit.moments[1], unit.emas[1]})
    for (size_t i = 0; i < 3; ++i) {
      const at::Tensor view = unit.view(buffer, i);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data_ptr()) % 64, 0u);
      EXPECT_TRUE(view.is_alias_of(buffer));
      EXPECT_TRUE(view.is_contiguous());
      EXPECT_EQ(view.sizes(), at::IntArrayRef(unit.layout().slots[i].shape));
    }
}

TEST(FlatUnit, BuffersShareNoStorageButF32Weights) {
  FlatUnit bf16 = make_unit(at::kBFloat16), f32 = make_unit(at::kFloat);
  EXPECT_FALSE(bf16.compute_weights.is_alias_of(bf16.master));
  EXPECT_TRUE(f32.compute_weights.is_same(f32.master));
  EXPECT_FALSE(f32.grads.is_alias_of(f32.master));
  EXPECT_FALSE(f32.moments[0].is_alias_of(f32.moments[1]));
}

TEST(FlatUnit, LeavesSeeTheFlatWeightsAndAutogradDoesNotSeeTheBuffer) {
  FlatUnit unit = make_unit(at::kBFloat16);
  const at::Tensor weight = unit.leaf(0);
  EXPECT_TRUE(weight.is_leaf());
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_FALSE(unit.compute_weights.requires_grad());
  unit.write(unit.master, 0, at::full({3, 5}, 1.5));
  EXPECT_EQ(weight.sum().item<double>(), 0);
  unit.refresh_weight_shard();
  EXPECT_EQ(weight.sum().item<double>(), 22.5);
  unit.start_emas();
  EXPECT_TRUE(at::equal(unit.emas[1], unit.master));
}

TEST(FlatUnit, PaddingStaysZero) {
  FlatUnit unit = make_unit(at::kFloat);
  for (size_t i = 0; i < 3; ++i) unit.write(unit.master, i, at::ones(unit.layout().slots[i].shape));
  EXPECT_EQ(unit.master.sum().item<double>(), 15 + 1 + 7);
}

TEST(FlatUnit, RefusesAnotherShapeByName) {
  FlatUnit unit = make_unit(at::kFloat);
  EXPECT_ERROR(unit.write(unit.master, 2, at::ones({8})), "bias expects shape [7], got [8]");
}

}  // namespace
}  // namespace kiln
