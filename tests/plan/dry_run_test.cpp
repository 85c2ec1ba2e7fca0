// Everything that a plan walks on meta: every family, autoencoder and text encoder of the registries, for
// both devices that a dry run stands for. What stands for a CPU runs the operations of the CPU, one by one.
// What stands for a GPU gives every weight a gradient and does the same work.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <cstdlib>
#include <map>
#include <set>

#include "core/aten.h"
#include "diffusion/objective.h"
#include "models/autoencoders/autoencoder.h"
#include "models/registry.h"
#include "models/text/text_registry.h"
#include "ops/op_recorder.h"
#include "ops/planned/engine_sums.h"
#include "plan/described_ops.h"
#include "plan/price/calibrate.h"
#include "plan/price/step_timing.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"
#include "test_files.h"

namespace kiln {
namespace {

using Names = std::set<std::string>;

// The operations of a program in two dry runs differ only in these. The first one shows that they do.
struct DeviceOps {
  std::vector<const char*> on_cpu, on_cuda;
};
const std::vector<DeviceOps>& documented_differences() {
  static const std::vector<DeviceOps> all = {
      // cuBLASLt's epilogues add biases and apply GELU inside a product.
      {{"kiln::gelu_tanh"}, {"kiln::affine_gelu"}},
      {{"kiln::gelu_tanh_backward"}, {"kiln::affine_grad_rows_gelu"}},
      {{"kiln::affine_grad_bias"}, {"kiln::affine_grad_weight", "aten::sum"}},
      // ATen's attention on a GPU leaves the gradients of q, k and v apart.
      {{"kiln::packed_attention_backward"}, {"kiln::pack_heads"}},
      // These have kernels on a CPU alone.
      {{"kiln::conv_forward"}, {"aten::convolution"}},
      {{"kiln::conv_grad_x"}, {"aten::convolution_backward"}},
      {{"kiln::conv_grad_weight"}, {"aten::convolution_backward"}},
      {{"kiln::relu_linear_attention"},
       {"aten::_to_copy", "aten::copy_", "aten::clamp_min", "aten::clone", "aten::bmm", "aten::sum",
        "aten::add", "aten::div"}},
      {{"kiln::relu_linear_attention_backward"},
       {"aten::mul", "aten::div_", "aten::neg_", "aten::threshold_backward", "aten::clamp_min", "aten::bmm"}},
      {{"kiln::glu_depthwise_conv"}, {"aten::silu", "aten::convolution", "aten::mul"}},
      {{"kiln::glu_depthwise_conv_backward"},
       {"aten::cat", "aten::silu_backward", "aten::convolution_backward"}},
      {{"kiln::rms_norm"},
       {"aten::linalg_vector_norm", "aten::pow", "aten::div", "aten::add", "aten::rsqrt", "aten::mul",
        "aten::_to_copy"}},
      {{"kiln::silu"}, {"aten::silu"}},
      {{"kiln::pixels_to_channels"}, {"aten::clone"}},
      {{"kiln::channels_to_pixels"}, {"aten::clone", "aten::repeat_interleave", "aten::index_select"}},
      {{"kiln::mean_of_pairs"}, {"aten::mean"}},
      {{"kiln::fused_attention"},
       {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"}},
      {{"aten::_scaled_dot_product_flash_attention_for_cpu"},
       {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"}},
      {{"aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
       {"aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_efficient_attention_backward"}},
      // A CPU's kernel has no gradient of a mask that is trained (T5's positions).
      {{"aten::_softmax_backward_data", "aten::bmm", "aten::clone"},
       {"aten::_scaled_dot_product_efficient_attention_backward"}},
  };
  return all;
}

Names names_of(const std::vector<OpRecord>& ops) {
  Names names;
  for (const OpRecord& op : ops) names.insert(op.name);
  return names;
}

// Operations of one of the plans alone for which nothing documented stands in the other.
void expect_documented_differences(const std::vector<OpRecord>& on_cpu,
                                   const std::vector<OpRecord>& on_cuda) {
  const Names cpu = names_of(on_cpu), cuda = names_of(on_cuda);
  Names may_miss, may_add = {"aten::_to_copy", "aten::copy_"};  // a GPU multiplies bf16, this CPU may not
  for (const DeviceOps& difference : documented_differences())
    if (cpu.contains(difference.on_cpu.front())) {
      may_miss.insert(difference.on_cpu.begin(), difference.on_cpu.end());
      may_add.insert(difference.on_cuda.begin(), difference.on_cuda.end());
    }
  Names missing, added;
  for (const std::string& name : cpu)
    if (!cuda.contains(name) && !may_miss.contains(name) && name != "aten::_to_copy" && name != "aten::copy_")
      missing.insert(name);
  for (const std::string& name : cuda)
    if (!cpu.contains(name) && !may_add.contains(name)) added.insert(name);
  EXPECT_THAT(missing, IsEmpty()) << "only in the plan of a CPU";
  EXPECT_THAT(added, IsEmpty()) << "only in the plan of a GPU";
}

double flops_in(const std::vector<OpRecord>& ops) {
  double flops = 0;
  for (const OpRecord& op : ops) flops += op.flops;
  return flops;
}

// Families

struct Variant {
  const char* label;
  at::ScalarType dtype;
  nlohmann::json options;
};
const std::array<Variant, 3> kVariants = {Variant{"f32", at::kFloat, {}},
                                          Variant{"bf16, recomputed", at::kBFloat16, {{"recompute", "all"}}},
                                          Variant{"bf16, an adapter", at::kBFloat16, {{"lora-rank", 4}}}};

// The family's own small training, or a small model that any family can be.
TrainOptions small_training(const Family& family, const Variant& variant) {
  CalibrationWorkload workload{
      .hidden_size = 96, .num_heads = 6, .depth = 2, .patch_size = 0, .image_size = 256, .batch = 4};
  if (!family.calibration.empty()) workload = family.calibration.front();
  workload.depth = std::min<int64_t>(workload.depth, 2);
  workload.batch = 3;
  workload.micro_batch = 2;
  TrainOptions options = calibration_step(family, workload, variant.dtype, at::kCPU);
  for (const auto& [name, value] : variant.options.items()) set_option(options, name, value);
  return options;
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const Family& family : denoiser_families()) names.emplace_back(family.name);
  return names;
}

class DryRunOfFamily : public testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }
};
INSTANTIATE_TEST_SUITE_P(Registry, DryRunOfFamily, testing::ValuesIn(family_names()),
                         [](const auto& info) { return info.param; });

TEST_P(DryRunOfFamily, RunsTheOperationsOfTheCpu) {
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(variant.label);
    TrainOptions options = small_training(family_of(GetParam()), variant);
    if (!std::getenv("KILN_FULL"))
      options.data.image_size /= 2;  // the same operations, a quarter of the work
    DataShape data = synthetic_shape(options);
    data.text.mean_rows = static_cast<double>(data.text.max_rows);  // steps take captions of the mean length
    test::expect_same_operations(
        test::described(trace_step(options, data, DryRunDevice::kCpu).spans),
        test::described(time_steps(options, data, at::kCPU, {.plain = 1, .watched = 1, .warm_up = 0}).spans));
  }
}

// The weights that get no gradient, of those that are trained.
Names without_gradient(const TrainOptions& options, DryRunDevice device) {
  const DryRunScope dry_run(device);
  const DataShape data = synthetic_shape(options);
  const Training training = build_training(options, data, at::kMeta);
  std::vector<at::Tensor> leaves;
  std::vector<std::string> keys;
  for (const auto& parameter : training.denoiser->parameters()) {
    if (!parameter->trainable) continue;
    parameter->value = parameter->value.detach().set_requires_grad(true);
    leaves.push_back(parameter->value);
    keys.push_back(parameter->key);
  }
  const auto on_meta = [](const HostArray& array, at::ScalarType dtype) {
    return at::empty(array.sizes, at::TensorOptions(at::kMeta).dtype(dtype));
  };
  const StepBatch batch = dry_batch(BatchOptions(), data, 2, on_meta).batch;
  const at::Tensor out = training.denoiser->forward(
      {.x_t = batch.x_0, .timesteps = at::empty({2}, at::kMeta), .conditioning = batch.conditioning});
  const auto gradients =
      torch::autograd::grad({out}, leaves, {at::empty_like(out)}, std::nullopt, false, /*allow_unused=*/true);
  Names missing;
  for (size_t i = 0; i < leaves.size(); ++i)
    if (!gradients[i].defined() || gradients[i].sizes() != leaves[i].sizes()) missing.insert(keys[i]);
  return missing;
}

struct Work {
  double forward = 0, recompute = 0, backward = 0;
};
Work work_of(const StepTrace& trace) {
  Work work;
  for (const Span& span : trace.spans) {
    const double flops = flops_in(span.ops) * static_cast<double>(span.times);
    if (span.phase == StepPhase::kForward) work.forward += flops;
    if (span.phase == StepPhase::kRecompute) work.recompute += flops;
    if (span.phase == StepPhase::kBackward) work.backward += flops;
  }
  return work;
}

TEST_P(DryRunOfFamily, OfAGpuDoesTheWorkOfTheCpu) {
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(variant.label);
    const TrainOptions options = small_training(family_of(GetParam()), variant);
    const DataShape data = synthetic_shape(options);
    EXPECT_THAT(without_gradient(options, DryRunDevice::kCpu), IsEmpty()) << "on a CPU";
    EXPECT_THAT(without_gradient(options, DryRunDevice::kCuda), IsEmpty()) << "on a GPU";
    const StepTrace on_cpu = trace_step(options, data, DryRunDevice::kCpu),
                    on_cuda = trace_step(options, data, DryRunDevice::kCuda);
    expect_documented_differences(ops_of(on_cpu.spans), ops_of(on_cuda.spans));
    const Work cpu = work_of(on_cpu), cuda = work_of(on_cuda);
    constexpr double kComposed = 0.05;  // ATen's operations of what a CPU has a kernel for count products
    EXPECT_NEAR(cuda.forward / cpu.forward, 1, kComposed);
    EXPECT_NEAR(cuda.backward / cpu.backward, 1, kComposed);
    EXPECT_NEAR(cuda.recompute, options.memory.recompute.is_all() ? cuda.forward : 0, 0.05 * cuda.forward);
    const bool trains_all = options.lora.rank == 0;  // else captions' products have no backward
    EXPECT_GE(cuda.backward / cuda.forward, trains_all ? 1.8 : 0.7);
    EXPECT_LE(cuda.backward / cuda.forward, trains_all ? 2.6 : 2.0);
  }
}

// While one is in scope, sees the results of this thread's operations, of those within others too. A picture
// has more channels than latents.
class PicturesOfAStep {
 public:
  PicturesOfAStep(int64_t rows, int64_t latent_channels)
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(nullptr, &look)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
    seen() = {.rows = rows, .latent_channels = latent_channels};
  }
  ~PicturesOfAStep() { at::removeCallback(handle_); }
  PicturesOfAStep(const PicturesOfAStep&) = delete;

  struct Seen {
    int64_t rows = 0, latent_channels = 0, num_channels_last = 0;
    Names of_other_formats{};  // the operations that made them
  };
  static Seen& seen() {
    static thread_local Seen seen;
    return seen;
  }

 private:
  static void look(const at::RecordFunction& function, at::ObserverContext*) {
    for (const c10::IValue& value : function.outputs()) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor& x = value.toTensor();
      // Heads of an attention have unequal sides, weights of convolutions have more rows, and what the
      // timestep adds to a picture has a single pixel.
      if (x.dim() != 4 || x.size(0) > seen().rows || x.size(1) <= seen().latent_channels ||
          x.size(2) != x.size(3) || x.size(2) == 1)
        continue;
      if (x.suggest_memory_format() == at::MemoryFormat::ChannelsLast)
        ++seen().num_channels_last;
      else
        seen().of_other_formats.insert(function.name());
    }
  }

  at::CallbackHandle handle_;
};

// A picture of another format would be copied before the next convolution or norm.
TEST(DryRunOfUnet, KeepsPicturesChannelsLastOnAGpu) {
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(variant.label);
    const TrainOptions options = small_training(family_of("unet2d_condition"), variant);
    const DataShape data = synthetic_shape(options);
    const PicturesOfAStep pictures(/*rows=*/2, data.channels);
    trace_step(options, data, DryRunDevice::kCuda);
    EXPECT_GT(pictures.seen().num_channels_last, 100);
    EXPECT_THAT(pictures.seen().of_other_formats, IsEmpty());
  }
}

// Autoencoders and text encoders. The program runs them forward alone, so that is what a plan walks. Their
// backward is compared too, since whoever trains through one needs it to be the CPU's.

enum class Walk { kForward, kBackward };
constexpr Walk kWalks[] = {Walk::kForward, Walk::kBackward};

const std::map<std::string, nlohmann::json>& narrow_autoencoders() {
  static const std::vector<std::string> blocks = {"ResBlock", "EfficientViTBlock"};
  static const std::map<std::string, nlohmann::json> configs = {
      {"AutoencoderKL", {{"block_out_channels", {8, 16}}, {"norm_num_groups", 4}, {"layers_per_block", 1}}},
      // Wide enough that products within its attention, which a CPU's kernel does not count, are few.
      {"AutoencoderDC",
       {{"encoder_block_out_channels", {16, 32}},
        {"decoder_block_out_channels", {16, 32}},
        {"encoder_layers_per_block", {1, 1}},
        {"decoder_layers_per_block", {1, 1}},
        {"encoder_block_types", blocks},
        {"decoder_block_types", blocks},
        {"encoder_qkv_multiscales", {nlohmann::json::array(), {5}}},
        {"decoder_qkv_multiscales", {nlohmann::json::array(), {5}}},
        {"decoder_act_fns", "relu"},
        {"attention_head_dim", 8},
        {"latent_channels", 8}}}};
  return configs;
}

// The operations of a program over weights, and backward those of the gradients of its result's sum.
template <class Program>
std::vector<OpRecord> ops_of_walk(Walk walk, const ParameterList& weights, const Program& program) {
  const at::AutoGradMode grad_mode(walk == Walk::kBackward);
  std::vector<at::Tensor> leaves;
  for (const auto& weight : weights)
    if (weight->trainable && walk == Walk::kBackward) leaves.push_back(weight->value.set_requires_grad(true));
  const EngineSumsInPlace sums;
  OpRecorder recorder(/*timed=*/false);
  const at::Tensor out = program();
  if (walk == Walk::kForward) return recorder.take();
  recorder.take();
  torch::autograd::grad({out}, leaves, {at::ones_like(out)}, std::nullopt, false, /*allow_unused=*/true);
  return recorder.take();
}

// What stands for a CPU is `real`, and what stands for a GPU does the same work.
void expect_plans_of(const std::vector<OpRecord>& real, const std::vector<OpRecord>& cpu,
                     const std::vector<OpRecord>& cuda) {
  test::expect_same_operations(test::described(cpu), test::described(real));
  expect_documented_differences(cpu, cuda);
  EXPECT_GT(flops_in(cpu), 0);
  EXPECT_NEAR(flops_in(cuda) / flops_in(cpu), 1, 0.05);
}

class DryRunOfAutoencoder : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int64_t kSide = 32;
  static std::unique_ptr<Autoencoder> built(at::Device device, at::ScalarType dtype) {
    const auto narrow = narrow_autoencoders().find(GetParam());
    nlohmann::json config = narrow == narrow_autoencoders().end() ? nlohmann::json::object() : narrow->second;
    config["_class_name"] = GetParam();
    auto autoencoder = build_autoencoder(config, {.device = device, .compute_dtype = dtype});
    if (!device.is_meta()) initialize_weights(autoencoder->parameters(), 0);
    return autoencoder;
  }
  // Encodes, or decodes a latent of a picture.
  static at::Tensor run(const Autoencoder& autoencoder, bool encodes, at::Device device) {
    const int64_t side = kSide / autoencoder.downsample;
    return encodes ? autoencoder.encode(at::zeros({2, 3, kSide, kSide}, device))
                   : autoencoder.decode(at::zeros({2, autoencoder.latent_channels, side, side}, device));
  }
  static std::vector<OpRecord> ops(Walk walk, bool encodes, at::Device device, at::ScalarType dtype) {
    const auto autoencoder = built(device, dtype);
    if (walk == Walk::kForward) autoencoder->freeze_weights();
    return ops_of_walk(walk, autoencoder->parameters(), [&] { return run(*autoencoder, encodes, device); });
  }
  static std::vector<OpRecord> planned(Walk walk, bool encodes, DryRunDevice device, at::ScalarType dtype) {
    const DryRunScope dry_run(device);
    return ops(walk, encodes, at::kMeta, dtype);
  }
};
INSTANTIATE_TEST_SUITE_P(Registry, DryRunOfAutoencoder, testing::ValuesIn(autoencoder_classes()),
                         [](const auto& info) { return info.param; });

TEST_P(DryRunOfAutoencoder, RunsTheOperationsOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const bool encodes : {true, false})
      for (const Walk walk : kWalks) {
        SCOPED_TRACE(fmt::format("{} {}{}", encodes ? "encode" : "decode", c10::toString(dtype),
                                 walk == Walk::kBackward ? ", backward" : ""));
        expect_plans_of(ops(walk, encodes, at::kCPU, dtype),
                        planned(walk, encodes, DryRunDevice::kCpu, dtype),
                        planned(walk, encodes, DryRunDevice::kCuda, dtype));
      }
}

TEST_P(DryRunOfAutoencoder, CutsNoGraph) {
  for (const DryRunDevice device : {DryRunDevice::kCpu, DryRunDevice::kCuda})
    for (const bool encodes : {true, false}) {
      const DryRunScope dry_run(device);
      const auto autoencoder = built(at::kMeta, at::kFloat);
      std::vector<at::Tensor> leaves;
      std::vector<std::string> keys;
      for (const auto& parameter : autoencoder->parameters()) {
        if (!parameter->trainable) continue;
        if (parameter->key.find(encodes ? "decode" : "encode") != std::string::npos) continue;
        if (parameter->key.find(encodes ? "post_quant" : "quant_conv") == 0) continue;
        leaves.push_back(parameter->value.set_requires_grad(true));
        keys.push_back(parameter->key);
      }
      const at::Tensor out = run(*autoencoder, encodes, at::kMeta);
      const auto gradients = torch::autograd::grad({out}, leaves, {at::empty_like(out)}, std::nullopt, false,
                                                   /*allow_unused=*/true);
      for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(gradients[i].defined()) << keys[i];
    }
}

struct NarrowEncoder {
  std::string label, name;
  nlohmann::json config;
};
// A narrow one of every kind, and whatever else the registry has.
std::vector<NarrowEncoder> text_encoders() {
  const nlohmann::json t5 = {{"d_model", 16},  {"d_kv", 4},       {"d_ff", 24},
                             {"num_heads", 4}, {"num_layers", 2}, {"vocab_size", 50}};
  nlohmann::json gated = t5;
  gated["feed_forward_proj"] = "gated-gelu";
  const nlohmann::json layers = {{"hidden_size", 16},
                                 {"intermediate_size", 24},
                                 {"num_hidden_layers", 2},
                                 {"num_attention_heads", 4},
                                 {"vocab_size", 50}};
  nlohmann::json gemma = layers;
  gemma["num_key_value_heads"] = 2;
  gemma["head_dim"] = 4;
  nlohmann::json uncapped = gemma;
  uncapped["attn_logit_softcapping"] = 0;
  std::vector<NarrowEncoder> all = {{"T5", "t5_encoder", t5},   {"T5Gated", "t5_encoder", gated},
                                    {"Bert", "bert", layers},   {"Clip", "clip_text", layers},
                                    {"Gemma", "gemma2", gemma}, {"GemmaUncapped", "gemma2", uncapped}};
  for (const std::string& name : text_encoder_names())
    if (std::ranges::find(all, name, &NarrowEncoder::name) == all.end())
      all.push_back({name, name, nlohmann::json::object()});
  return all;
}

class DryRunOfTextEncoder : public testing::TestWithParam<NarrowEncoder> {
 protected:
  // Texts of two lengths. With `masked`, a token of the first is not seen.
  static TokenRows tokens(const TextEncoder& encoder, at::Device device, bool masked) {
    std::vector<int64_t> lengths = {5, 5, 3};
    if (encoder.shape().users_see_padding) lengths = {encoder.shape().max_tokens, encoder.shape().max_tokens};
    TokenRows rows{.host_offsets = {0}};
    for (const int64_t length : lengths) rows.host_offsets.push_back(rows.host_offsets.back() + length);
    rows.ids = at::zeros({rows.host_offsets.back()}, at::TensorOptions(device).dtype(at::kLong));
    if (masked) {
      rows.counts = at::ones({rows.host_offsets.back()}, at::TensorOptions(device).dtype(at::kBool));
      rows.counts.narrow(0, 2, 1).zero_();
    }
    return rows;
  }
  static std::vector<OpRecord> ops(Walk walk, at::Device device, at::ScalarType dtype, bool masked) {
    const auto encoder =
        build_text_encoder(GetParam().name, GetParam().config, {.device = device, .compute_dtype = dtype});
    if (!device.is_meta()) initialize_weights(encoder->parameters(), 0);
    const TokenRows rows = tokens(*encoder, device, masked);
    return ops_of_walk(walk, encoder->parameters(), [&] { return encoder->forward({.tokens = rows}); });
  }
  static std::vector<OpRecord> planned(Walk walk, DryRunDevice device, at::ScalarType dtype, bool masked) {
    const DryRunScope dry_run(device);
    return ops(walk, at::kMeta, dtype, masked);
  }
  // Capped scores are capped in place on every device, which autograd refuses.
  static bool has_backward() { return GetParam().label != "Gemma"; }
};
INSTANTIATE_TEST_SUITE_P(Registry, DryRunOfTextEncoder, testing::ValuesIn(text_encoders()),
                         [](const auto& info) { return info.param.label; });

TEST_P(DryRunOfTextEncoder, RunsTheOperationsOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const bool masked : {false, true})
      for (const Walk walk : kWalks) {
        if (walk == Walk::kBackward && !has_backward()) continue;
        SCOPED_TRACE(fmt::format("{}{}{}", c10::toString(dtype), masked ? ", masked" : "",
                                 walk == Walk::kBackward ? ", backward" : ""));
        expect_plans_of(ops(walk, at::kCPU, dtype, masked), planned(walk, DryRunDevice::kCpu, dtype, masked),
                        planned(walk, DryRunDevice::kCuda, dtype, masked));
      }
}

TEST_P(DryRunOfTextEncoder, CutsNoGraph) {
  if (!has_backward()) GTEST_SKIP() << "forward alone";
  for (const DryRunDevice device : {DryRunDevice::kCpu, DryRunDevice::kCuda}) {
    const DryRunScope dry_run(device);
    const auto encoder = build_text_encoder(GetParam().name, GetParam().config, {.device = at::kMeta});
    std::vector<at::Tensor> leaves;
    for (const auto& parameter : encoder->parameters())
      leaves.push_back(parameter->value.set_requires_grad(true));
    const at::Tensor out = encoder->forward({.tokens = tokens(*encoder, at::kMeta, /*masked=*/true)});
    const auto gradients = torch::autograd::grad({out}, leaves, {at::empty_like(out)}, std::nullopt, false,
                                                 /*allow_unused=*/true);
    for (size_t i = 0; i < leaves.size(); ++i)
      EXPECT_TRUE(gradients[i].defined()) << encoder->parameters()[i]->key;
  }
}

TEST(DryRun, NamesAnArrayThatIsReadOnTheHost) {
  const auto names_it =
      testing::ThrowsMessage<std::exception>(HasSubstr("a dry run reads the batch's image sizes"));
  for (const at::Device device : {at::kCPU, at::kMeta}) {
    const at::Tensor array = array_without_values("image sizes", {2, 2}, at::kFloat, device);
    EXPECT_EQ(array.to(at::kMeta).sizes(), array.sizes());
    EXPECT_EQ((array.narrow(0, 0, 1).to(at::kMeta) * 2).size(0), 1);
    EXPECT_THAT([&] { (void)array.const_data_ptr<float>(); }, names_it);
    EXPECT_ANY_THROW((void)array.sum().item<double>());
  }
}

}  // namespace
}  // namespace kiln
