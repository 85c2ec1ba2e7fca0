// Any bytes as a LoRA adapter in the formats of PEFT, diffusers and kohya, merged into a model of two layers.
// Of its sources libtorch is not instrumented; the options below keep it from being reported.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include "fuzz/cut_folder.h"
#include "models/lora_keys.h"

namespace kiln {
// The registry, with every family of models, would be linked for these two names alone.
std::vector<std::string> denoiser_components() { return {"transformer", "unet"}; }
}  // namespace kiln

extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:detect_container_overflow=0:alloc_dealloc_mismatch=0";
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  at::set_num_threads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr const char* kNames[] = {"adapter_config.json", "adapter_model.safetensors", "kohya.safetensors"};
  const kiln::test::CutFolder folder(kNames, data, size);
  // A PEFT folder has the config beside its weights, so what has none is read as a file of its own.
  const bool is_peft = std::filesystem::exists(folder.path("adapter_config.json"));
  const std::string path = is_peft ? folder.name() : folder.path("kohya.safetensors").string();
  try {
    kiln::TensorMap weights = {{"blocks.0.proj.weight", at::zeros({4, 4})},
                               {"blocks.0.conv.weight", at::zeros({4, 4, 3, 3})}};
    const auto layers = kiln::read_lora(path, {"blocks.0.proj", "blocks.0.conv"});
    for (const kiln::LoraFormat format :
         {kiln::LoraFormat::kPeft, kiln::LoraFormat::kDiffusers, kiln::LoraFormat::kKohya})
      kiln::write_lora(layers, format, "transformer");
    kiln::merge_layers(weights, layers, {});
  } catch (const kiln::Error&) {
  }
  return 0;
}
