#include "checkpoint/tensor_files.h"
#include "core/aten.h"

#include "checkpoint/weights_file.h"
#include "core/dtype.h"
#include "core/tensors.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(TensorFiles, EveryDtypeAndLayoutSurvives) {
  const TempFolder folder;
  std::map<std::string, at::Tensor> tensors;
  for (const auto type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
                          at::kBFloat16, at::kFloat, at::kDouble})
    tensors[c10::toString(type)] = at::arange(6).to(type).view({2, 3});
  tensors["transposed"] = at::arange(6.).view({2, 3}).t();
  tensors["scalar"] = at::scalar_tensor(2.5);
  tensors["empty"] = at::empty({0, 3});
  save_tensors(folder / "t.safetensors", tensors, {{"k", "v"}});
  const auto loaded = load_tensors(folder / "t.safetensors");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(loaded.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(loaded.at(name), tensor)) << name;
  }
}

TEST(TensorFiles, TensorsKeepTheMappedFileAliveAndNeverChangeIt) {
  const TempFolder folder;
  save_tensors(folder / "t.safetensors", {{"w", at::ones({1000})}});
  at::Tensor kept = load_tensors(folder / "t.safetensors").at("w");
  kept.add_(1);
  EXPECT_EQ(kept.sum().item<float>(), 2000);
  EXPECT_EQ(load_tensors(folder / "t.safetensors").at("w").sum().item<float>(), 1000);
}

TEST(TensorFiles, DataAtAnOddPlaceIsCopied) {
  const TempFolder folder;
  const std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} )";
  ASSERT_EQ(header.size() % 4, 3u);
  const uint64_t size = header.size();
  const float values[2] = {1.5, -2};
  test::write_bytes(folder / "odd.safetensors", std::string(reinterpret_cast<const char*>(&size), 8) +
                                                    header +
                                                    std::string(reinterpret_cast<const char*>(values), 8));
  const at::Tensor loaded = load_tensors(folder / "odd.safetensors").at("w");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(loaded.data_ptr()) % 4, 0u);
  EXPECT_TRUE(at::equal(loaded, at::tensor({1.5f, -2.f})));
}

TEST(TensorFiles, PtFilesComeThroughTheSameDoor) {
  const TempFolder folder;
  const std::vector<float> model = {1}, ema = {2};
  const auto group = [](const std::string& name, const std::vector<float>& values) {
    return PtGroup{name, {{"w", {Dtype::kF32, {1}, std::as_bytes(std::span(values))}}}};
  };
  write_pt(folder / "c.pt", {group("model", model), group("ema", ema)});
  EXPECT_EQ(load_tensors(folder / "c.pt").at("w").item<float>(), 2);
  EXPECT_EQ(load_tensors(folder / "c.pt", false).at("w").item<float>(), 1);
}

TEST(Tensors, ComputeDtypesByName) {
  EXPECT_EQ(parse_compute_dtype("f32"), at::kFloat);
  EXPECT_EQ(parse_compute_dtype("bf16"), at::kBFloat16);
  EXPECT_EQ(parse_compute_dtype("fp16"), at::kHalf);
  EXPECT_ERROR(parse_compute_dtype("float8"), "expected f32, bf16 or fp16, got \"float8\"");
  EXPECT_ERROR(from_scalar_type(at::kComplexFloat), "ComplexFloat");
}

// torch's own rounding is the oracle of the torch-free one, on every exponent and many mantissas.
TEST(Tensors, RoundingIsTorchs) {
  at::manual_seed(0);
  const at::Tensor bits = at::randint(INT32_MIN, INT32_MAX, {1 << 20}, at::kInt);
  const at::Tensor values = bits.view(at::kFloat);
  const at::Tensor finite = values.masked_select(values.isfinite());
  const at::Tensor half = finite.to(at::kHalf).view(at::kShort),
                   bfloat = finite.to(at::kBFloat16).view(at::kShort);
  for (int64_t i = 0; i < finite.numel(); ++i) {
    const float value = finite.const_data_ptr<float>()[i];
    ASSERT_EQ(float_to_fp16(value), static_cast<uint16_t>(half.const_data_ptr<int16_t>()[i])) << value;
    ASSERT_EQ(float_to_bf16(value), static_cast<uint16_t>(bfloat.const_data_ptr<int16_t>()[i])) << value;
  }
}

}  // namespace
}  // namespace kiln
