// Adapters in each format, written and read back. tests/reference/test_lora.py reads files of peft and
// diffusers.
#include "models/lora_keys.h"

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "test_files.h"

namespace kiln {
namespace {

const std::vector<std::string> kModules = {"down_blocks.0.attentions.1.proj_in", "mid_block.attn1.to_out.0"};

std::vector<LoraLayer> two_layers() {
  at::manual_seed(1);
  return {
      {.module = kModules[0], .down = at::randn({2, 4, 3, 3}), .up = at::randn({8, 2, 1, 1}), .scale = 0.5},
      {.module = kModules[1], .down = at::randn({3, 6}), .up = at::randn({5, 3}), .scale = 2}};
}

std::string write(const TempFolder& folder, LoraFormat format) {
  const LoraFile file = write_lora(two_layers(), format, "unet");
  const std::string path = folder / "adapter_model.safetensors";
  save_tensors(path, file.tensors);
  if (format == LoraFormat::kPeft)
    std::ofstream(folder / "adapter_config.json") << file.adapter_config.dump();
  return path;
}

class LoraFormats : public testing::TestWithParam<LoraFormat> {};

TEST_P(LoraFormats, GiveBackWhatWasWritten) {
  const TempFolder folder;
  std::vector<LoraLayer> read = read_lora(write(folder, GetParam()), kModules);
  std::ranges::sort(read, {}, &LoraLayer::module);
  const std::vector<LoraLayer> want = two_layers();
  ASSERT_EQ(read.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(read[i].module, want[i].module);
    EXPECT_TRUE(at::equal(read[i].down, want[i].down));
    EXPECT_TRUE(at::allclose(read[i].up * read[i].scale, want[i].up * want[i].scale));
  }
}

INSTANTIATE_TEST_SUITE_P(All, LoraFormats,
                         testing::Values(LoraFormat::kPeft, LoraFormat::kDiffusers, LoraFormat::kKohya),
                         [](const auto& info) -> std::string {
                           if (info.param == LoraFormat::kPeft) return "Peft";
                           return info.param == LoraFormat::kDiffusers ? "Diffusers" : "Kohya";
                         });

TEST(LoraKeys, FilesThatCannotBeReadSayWhy) {
  const TempFolder folder;
  const std::string path = folder / "file.safetensors";
  const at::Tensor down = at::zeros({2, 4}), up = at::zeros({4, 2});
  const auto message = [&](const std::map<std::string, at::Tensor>& tensors) {
    save_tensors(path, tensors);
    return message_of([&] { read_lora(path, kModules); });
  };
  EXPECT_THAT(message({{"lora_unet_other.lora_down.weight", down}, {"lora_unet_other.lora_up.weight", up}}),
              HasSubstr("lora_unet_other names no layer of the model"));
  EXPECT_THAT(message({{"unet.a.lora_A.weight", down}}), HasSubstr("but not unet.a.lora_B.weight"));
  EXPECT_THAT(message({{"lora_te_a.lora_down.weight", down}, {"lora_te_a.lora_up.weight", up}}),
              HasSubstr("holds no adapter of a denoiser"));
  EXPECT_THAT(message({{"unet.a.hada_w1_a", down}}),
              HasSubstr("unet.a.hada_w1_a, which is no part of a pair"));
}

}  // namespace
}  // namespace kiln
