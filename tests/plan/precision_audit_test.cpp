// The audit finds what is planted into a step, each by the name of its segment and operation.
#include "watch/precision_audit.h"

#include <functional>

#include "core/aten.h"
#include "diffusion/objective.h"
#include "ops/op_recorder.h"
#include "optim/optimizer.h"
#include "step/span_recorder.h"
#include "step/training_state.h"
#include "test_files.h"
#include "train/tiny_model.h"

namespace kiln {
namespace {

using nlohmann::json;

using Plant = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>;

// x + W x in the weight's dtype on a stream of f32, and what is planted.
class Block : public Segment {
 public:
  Block(const std::string& name, const BuildOptions& options, Plant plant = nullptr)
      : plant_(std::move(plant)) {
    name_ = name;
    weight_ =
        std::make_shared<Parameter>(Parameter{.key = name + ".weight",
                                              .value = at::empty({4, 4}, at::TensorOptions(options.device)),
                                              .init = Init::normal(0.05)});
    parameters_.push_back(weight_);
  }
  State forward(const State& before, const ModelInput& input) const override {
    const at::Tensor x = before.hidden.defined() ? before.hidden : input.x_t.flatten(2).transpose(1, 2);
    const at::Tensor& weight = weight_->value;
    State state;
    state.hidden = x + at::linear(x.to(weight.scalar_type()), weight).to(at::kFloat);
    if (plant_) state.hidden = plant_(state.hidden, weight);
    if (name_ == "out") state.hidden = state.hidden.transpose(1, 2).reshape(input.x_t.sizes());
    return state;
  }

 private:
  std::shared_ptr<Parameter> weight_;
  Plant plant_;
};

class PlantedModel : public Denoiser {
 public:
  PlantedModel(const BuildOptions& options, const std::vector<std::pair<std::string, Plant>>& blocks) {
    shape_ = {.in_channels = 4, .out_channels = 4, .input_size = 8};
    for (const auto& [name, plant] : blocks)
      segments_.push_back(std::make_unique<Block>(name, options, plant));
  }
};

json audited(const std::vector<std::pair<std::string, Plant>>& blocks, at::ScalarType compute_dtype) {
  const PlantedModel model({.compute_dtype = compute_dtype}, blocks);
  const auto objective = make_objective(objective_config("flow"));
  const auto optimizer = make_optimizer({{"type", "adamw"}});
  for (const auto& parameter : model.parameters())
    initialize(parameter->init, 0, parameter->key, parameter->value);
  TrainingState state(
      model, *optimizer,
      {.device = at::kCPU, .compute_dtype = compute_dtype, .grad_dtype = compute_dtype, .ema_decays = {}});
  TrainStep step(model, *objective, *optimizer, state, {});
  at::manual_seed(0);
  const StepBatch batch{.x_0 = at::randn({2, 4, 8, 8}),
                        .noise = at::randn({2, 4, 8, 8}),
                        .timesteps = objective->timesteps(at::rand({2}))};
  OpRecorder ops(OpRecorder::Options{.timed = true, .checks_values = true});
  SpanRecorder recorder(&ops);
  step.observe(&recorder);
  step.run(batch, 1e-3);
  PrecisionContext context{.compute_dtype = compute_dtype};
  for (const auto& [name, plant] : blocks) context.segments.push_back(name);
  return audit_precision(recorder.finish().spans, context);
}

// Rows of this segment in a phase.
std::vector<json> rows(const json& list, const std::string& segment, const std::string& phase = "forward") {
  std::vector<json> found;
  for (const json& row : list)
    if (row.at("segment") == segment && row.at("phase") == phase) found.push_back(row);
  return found;
}

// The audit of a step with this in its middle.
json audited_with(Plant plant, at::ScalarType compute_dtype) {
  return audited({{"in", nullptr}, {"middle", std::move(plant)}, {"out", nullptr}}, compute_dtype);
}

TEST(PrecisionAudit, FindsNothingInACleanStep) {
  const json audit = audited_with(nullptr, at::kBFloat16);
  EXPECT_TRUE(audit["overflows"].empty()) << audit["overflows"];
  for (const json& row : audit["f32"]) EXPECT_FALSE(row["is_product"].get<bool>()) << row;
  for (const json& row : audit["casts"])
    for (const char* key : {"from", "to"}) EXPECT_TRUE(row[key] == "f32" || row[key] == "bf16") << row;
  double shares = 0;
  for (const json& row : audit["by_dtype"]) shares += row["share"].get<double>();
  EXPECT_NEAR(shares, 1, 1e-9);
  EXPECT_GT(audit["seconds"].get<double>(), 0);
}

TEST(PrecisionAudit, FindsAPlantedCast) {
  const json audit = audited_with(
      [](const at::Tensor& x, const at::Tensor&) { return x.to(at::kHalf).to(at::kFloat); }, at::kBFloat16);
  int64_t found = 0;
  for (const json& row : audit["casts"]) {
    if (row["from"] != "fp16" && row["to"] != "fp16") continue;
    EXPECT_EQ(row["segment"], "middle");
    EXPECT_EQ(row["num"], 1);
    EXPECT_EQ(row["bytes"], 2 * 64 * 4 * (4 + 2));
    EXPECT_GT(row["seconds"].get<double>(), 0);
    ++found;
  }
  EXPECT_EQ(found, 4) << "to fp16 and back, forward and backward: " << audit["casts"];
}

TEST(PrecisionAudit, FindsAPlantedProductInF32) {
  const auto product = [](const at::Tensor& x, const at::Tensor& weight) {
    return at::matmul(x, weight.to(at::kFloat));
  };
  const json audit = audited_with(product, at::kBFloat16);
  for (const char* phase : {"forward", "backward"}) {
    bool found = false;
    for (const json& row : rows(audit["f32"], "middle", phase)) found |= row["is_product"].get<bool>();
    EXPECT_TRUE(found) << phase << audit["f32"];
  }
  for (const json& row : audit["f32"])
    if (row["is_product"]) {
      EXPECT_EQ(row["segment"], "middle");
      EXPECT_THAT(row["why"].get<std::string>(), HasSubstr("its operands are f32"));
    }
  EXPECT_THAT(precision_text(audit), HasSubstr("its operands are f32"));
}

TEST(PrecisionAudit, FindsAPlantedOverflow) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const json audit =
        audited_with([](const at::Tensor& x, const at::Tensor&) { return x * 1e38 * 1e10; }, dtype);
    ASSERT_FALSE(audit["overflows"].empty());
    const json& first = audit["overflows"][0];
    EXPECT_EQ(first["segment"], "middle");
    EXPECT_EQ(first["phase"], "forward");
    EXPECT_EQ(first["operation"], "aten::mul");
    EXPECT_GT(first["values"], 0);
    EXPECT_THAT(precision_text(audit),
                HasSubstr("values overflow first at aten::mul in the forward of middle"));
  }
}

TEST(PrecisionAudit, SaysHowNearFp16IsToItsEnd) {
  const auto near_the_end = [](const at::Tensor& x, const at::Tensor&) {
    return x + (x * 0 + 60000).to(at::kHalf).to(at::kFloat) * 0;
  };
  const json audit = audited_with(near_the_end, at::kHalf);
  const json& first = audit["largest"][0];
  EXPECT_EQ(first["segment"], "middle");
  EXPECT_EQ(first["dtype"], "fp16");
  EXPECT_NEAR(first["share_of_range"].get<double>(), 60000.0 / 65504, 1e-3);
  EXPECT_THAT(audit["advice"].dump(), HasSubstr("reach 92 % of fp16's range"));
}

TEST(PrecisionAudit, SendsOnlyFp16ToBf16AndLabelsNoRowOf16BitsF32) {
  Span span;
  span.segment = 0;
  for (const auto& [dtype, largest] : {std::pair{at::kBFloat16, 3e38}, {at::kFloat, 3.2e38}})
    span.ops.push_back({.name = "aten::mm", .dtype = dtype, .from = dtype, .largest = largest});
  const json in_bf16 = audit_precision({span}, {.compute_dtype = at::kBFloat16, .segments = {"middle"}});
  ASSERT_EQ(in_bf16["largest"].size(), 1);
  EXPECT_EQ(in_bf16["largest"][0]["dtype"], "bf16");
  EXPECT_NEAR(in_bf16["largest"][0]["value"].get<double>(), 3.2e38, 1e30);
  EXPECT_THAT(in_bf16["advice"].dump(), ::testing::Not(HasSubstr("bf16 has more")));
  span.ops.erase(span.ops.begin());
  EXPECT_TRUE(
      audit_precision({span}, {.compute_dtype = at::kFloat, .segments = {"middle"}})["largest"].empty());
}

TEST(PrecisionAudit, InF32NothingIsSaidToRunInF32) {
  const json audit = audited_with(nullptr, at::kFloat);
  EXPECT_TRUE(audit["f32"].empty());
  EXPECT_THAT(audit["advice"].dump(), HasSubstr("--compute-dtype bf16"));
}

}  // namespace
}  // namespace kiln
