// Objectives: the registry, timesteps, devices and gradients. Values are compared with other implementations
// in tests/reference/test_loss.py.
#include "diffusion/objective.h"
#include "core/aten.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <numbers>

#include "diffusion/flow_objective.h"
#include "diffusion/schedule.h"
#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

struct Drawn {
  at::Tensor x_0, noise, prediction;
};
Drawn draw(int64_t batch, int64_t channels, bool learns_sigma) {
  at::manual_seed(0);
  return {at::randn({batch, channels, 4, 4}), at::randn({batch, channels, 4, 4}),
          at::randn({batch, learns_sigma ? 2 * channels : channels, 4, 4})};
}

TEST(Objective, RegistryListsEveryName) {
  EXPECT_THAT(objective_names(), ElementsAre("iddpm", "epsilon", "v_prediction", "x_0", "flow"));
}

class EveryObjective : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Names, EveryObjective, ::testing::ValuesIn(objective_names()));

TEST_P(EveryObjective, LossIsZeroOrLeastAtTheTarget) {
  const auto objective = make_objective(objective_config(GetParam()));
  const Drawn drawn = draw(5, 4, objective->learns_sigma());
  const at::Tensor t = objective->timesteps(at::tensor({0.001, 0.2, 0.5, 0.8, 0.999}, at::kDouble));
  const NoisedBatch noised = objective->add_noise(drawn.x_0, drawn.noise, t);
  at::Tensor prediction = drawn.prediction.clone();
  prediction.narrow(1, 0, 4).copy_(noised.target);
  const LossTerms terms = objective->loss(prediction, drawn.x_0, drawn.noise, noised);
  EXPECT_EQ(terms.terms.at(0).abs().max().item<float>(), 0);
  EXPECT_EQ(terms.loss.sizes(), at::IntArrayRef({5}));
  EXPECT_TRUE((objective->loss(drawn.prediction, drawn.x_0, drawn.noise, noised).loss > terms.loss)
                  .all()
                  .item<bool>());
}

// x_0 from the target and x_t: what the samplers will assume of a trained model.
TEST_P(EveryObjective, TargetAndNoisedInputDetermineTheImage) {
  const json config = objective_config(GetParam());
  const auto objective = make_objective(config);
  const Drawn drawn = draw(3, 4, false);
  const at::Tensor t = objective->timesteps(at::tensor({0.1, 0.4, 0.7}, at::kDouble));
  const NoisedBatch noised = objective->add_noise(drawn.x_0, drawn.noise, t);
  at::Tensor x_0;
  if (config.at("type") == "flow") {
    x_0 = noised.x_t - t.view({-1, 1, 1, 1}) * noised.target;
  } else {
    const std::vector<double> bars = cumulative_alphas(iddpm_betas("linear", 1000));
    std::vector<double> alpha, sigma;
    for (int64_t i = 0; i < 3; ++i) {
      const double bar = bars[static_cast<size_t>(t[i].item<int64_t>())];
      alpha.push_back(std::sqrt(bar));
      sigma.push_back(std::sqrt(1 - bar));
    }
    const at::Tensor a = at::tensor(alpha, at::kFloat).view({-1, 1, 1, 1});
    const at::Tensor s = at::tensor(sigma, at::kFloat).view({-1, 1, 1, 1});
    x_0 = GetParam() == "x_0"            ? noised.target
          : GetParam() == "v_prediction" ? a * noised.x_t - s * noised.target
                                         : (noised.x_t - s * noised.target) / a;
  }
  EXPECT_TRUE(at::allclose(x_0, drawn.x_0, 1e-4, 1e-4));
}

TEST_P(EveryObjective, RunsOnMetaWithoutLookingAtValues) {
  const auto objective = make_objective(objective_config(GetParam()));
  const auto options = at::TensorOptions().device(at::kMeta);
  const at::Tensor x_0 = at::empty({3, 4, 8, 8}, options);
  const at::Tensor t = objective->timesteps(at::empty({3}, options.dtype(at::kDouble)));
  const NoisedBatch noised = objective->add_noise(x_0, x_0, t);
  const at::Tensor prediction =
      at::empty({3, objective->learns_sigma() ? 8 : 4, 8, 8}, options).set_requires_grad(true);
  const LossTerms terms = objective->loss(prediction, x_0, x_0, noised);
  const auto gradients = torch::autograd::grad({terms.loss.sum()}, {prediction});
  EXPECT_EQ(gradients.at(0).sizes(), prediction.sizes());
  EXPECT_EQ(noised.model_t.scalar_type(), at::kFloat);
  EXPECT_EQ(objective->position(t).sizes(), at::IntArrayRef({3}));
}

TEST_P(EveryObjective, PositionsGrowWithTheNoise) {
  const auto objective = make_objective(objective_config(GetParam()));
  const at::Tensor t = objective->timesteps(at::linspace(0, 0.9999, 50, at::kDouble));
  const at::Tensor position = objective->position(t);
  EXPECT_GE(position.min().item<float>(), 0);
  EXPECT_LE(position.max().item<float>(), 1);
  EXPECT_TRUE((position.diff() > 0).all().item<bool>());
  const at::Tensor one = at::ones({50, 1, 1, 1});
  const at::Tensor levels = objective->add_noise(at::zeros({50, 1, 1, 1}), one, t).x_t.flatten();
  EXPECT_TRUE((levels.diff() > 0).all().item<bool>());
}

TEST(Objective, UniformsMapToEveryTimestep) {
  const auto objective = make_objective({{"type", "iddpm"}, {"num_train_timesteps", 100}});
  const at::Tensor t =
      objective->timesteps(at::tensor({0.0, 0.0099, 0.01, 0.5, 0.99, 0.9999999999999999}, at::kDouble));
  EXPECT_TRUE(at::equal(t, at::tensor({0, 0, 1, 50, 99, 99}, at::kLong)));
}

TEST(Objective, LogitNormalIsDrawnByItsInverseCdf) {
  const auto objective = make_objective({{"type", "flow"},
                                         {"timestep_sampling", "logit_normal"},
                                         {"logit_mean", 0.5},
                                         {"logit_std", 0.8},
                                         {"shift", 3.0}});
  // Quantiles of N(0, 1) at 0.5 and one standard deviation to either side.
  const at::Tensor sigma =
      objective->timesteps(at::tensor({0.0, 0.15865525393, 0.5, 0.84134474607}, at::kDouble));
  const auto expected = [](double z) {
    const double t = 1 / (1 + std::exp(-(0.5 + 0.8 * z)));
    return 3 * t / (1 + 2 * t);
  };
  EXPECT_EQ(sigma[0].item<float>(), 0);
  for (int i : {1, 2, 3}) EXPECT_NEAR(sigma[i].item<float>(), expected(i - 2), 1e-6);
}

TEST(Objective, IndexModesOfFlowFloorTheDensity) {
  for (const char* mode : {"sana", "diffusers"}) {
    const auto objective =
        make_objective({{"type", "flow"}, {"mode", mode}, {"timestep_sampling", "logit_normal"}});
    const at::Tensor t = objective->timesteps(at::tensor({0.0, 0.5, 0.9999999999999999}, at::kDouble));
    EXPECT_EQ(t.scalar_type(), at::kLong);
    EXPECT_EQ(t[0].item<int64_t>(), 0);
    EXPECT_EQ(t[1].item<int64_t>(), 500);
    EXPECT_LE(t[2].item<int64_t>(), 999);
  }
}

TEST(Objective, TheBoundTrainsTheVarianceAlone) {
  const auto objective = make_objective({{"type", "iddpm"}});
  const Drawn drawn = draw(3, 4, true);
  const NoisedBatch noised = objective->add_noise(drawn.x_0, drawn.noise, at::tensor({0, 1, 500}, at::kLong));
  const at::Tensor prediction = drawn.prediction.clone().set_requires_grad(true);
  const at::Tensor vb = objective->loss(prediction, drawn.x_0, drawn.noise, noised).terms.at(1);
  const at::Tensor gradient = torch::autograd::grad({vb.sum()}, {prediction}).at(0);
  EXPECT_EQ(gradient.narrow(1, 0, 4).abs().max().item<float>(), 0);
  for (int64_t row = 0; row < 3; ++row) EXPECT_GT(gradient[row].narrow(0, 4, 4).abs().max().item<float>(), 0);
}

TEST_P(EveryObjective, GivesTheTermsThatItNames) {
  const auto objective = make_objective(objective_config(GetParam()));
  const std::vector<std::string> names = objective->term_names();
  EXPECT_EQ(names, GetParam() == "iddpm" ? std::vector<std::string>({"mse", "vb"})
                                         : std::vector<std::string>({"mse"}));
  const Drawn drawn = draw(3, 4, objective->learns_sigma());
  const at::Tensor t = objective->timesteps(at::tensor({0.1, 0.5, 0.9}, at::kDouble));
  const NoisedBatch noised = objective->add_noise(drawn.x_0, drawn.noise, t);
  const LossTerms terms = objective->loss(drawn.prediction, drawn.x_0, drawn.noise, noised);
  ASSERT_EQ(terms.terms.size(), names.size());
  EXPECT_TRUE(at::equal(at::stack(terms.terms).sum(0), terms.loss));
}

// A loss must not depend on which other samples share the batch, nor on their number.
TEST_P(EveryObjective, SamplesAreIndependent) {
  const auto objective = make_objective(objective_config(GetParam()));
  const Drawn drawn = draw(4, 4, objective->learns_sigma());
  const at::Tensor t = objective->timesteps(at::tensor({0.0, 0.3, 0.6, 0.9}, at::kDouble));
  const NoisedBatch all = objective->add_noise(drawn.x_0, drawn.noise, t);
  const at::Tensor losses = objective->loss(drawn.prediction, drawn.x_0, drawn.noise, all).loss;
  for (int64_t i = 0; i < 4; ++i) {
    const at::Tensor x_0 = drawn.x_0.narrow(0, i, 1), noise = drawn.noise.narrow(0, i, 1);
    const NoisedBatch one = objective->add_noise(x_0, noise, t.narrow(0, i, 1));
    EXPECT_FLOAT_EQ(objective->loss(drawn.prediction.narrow(0, i, 1), x_0, noise, one).loss.item<float>(),
                    losses[i].item<float>());
  }
}

TEST(Schedule, LinearBetasScaleWithTheirNumber) {
  const std::vector<double> betas = iddpm_betas("linear", 1000);
  EXPECT_DOUBLE_EQ(betas.front(), 1e-4);
  EXPECT_DOUBLE_EQ(betas.back(), 0.02);
  EXPECT_DOUBLE_EQ(iddpm_betas("linear", 250).front(), 4e-4);
  EXPECT_DOUBLE_EQ(iddpm_betas("linear", 250).back(), 0.08);
}

TEST(Schedule, CosineBetasAreCapped) {
  const std::vector<double> betas = iddpm_betas("squaredcos_cap_v2", 1000);
  EXPECT_DOUBLE_EQ(betas.back(), 0.999);
  // alpha_bar follows cos^2 (Nichol & Dhariwal 2021, eq. 17).
  const double start = std::pow(std::cos(0.008 / 1.008 * std::numbers::pi / 2), 2);
  const double half = std::pow(std::cos((0.5 + 0.008) / 1.008 * std::numbers::pi / 2), 2);
  EXPECT_NEAR(cumulative_alphas(betas)[499], half / start, 1e-12);
}

TEST(Schedule, PosteriorVarianceHasNoLogOfZero) {
  const IddpmTables tables(iddpm_betas("linear", 1000));
  EXPECT_EQ(tables.posterior_variance[0], 0);
  EXPECT_EQ(tables.posterior_log_variance[0], tables.posterior_log_variance[1]);
  EXPECT_NEAR(tables.mean_x_0[0], 1, 1e-12);
  EXPECT_EQ(tables.mean_x_t[0], 0);
}

TEST(Schedule, TablesAreGatheredAsF32OfF64) {
  const Table table({0.1, 1.0 / 3, 1e-12});
  const at::Tensor values = table.gather(at::tensor({2, 0, 1, 1}, at::kLong));
  EXPECT_EQ(values.scalar_type(), at::kFloat);
  EXPECT_EQ(values[2].item<float>(), static_cast<float>(1.0 / 3));
  EXPECT_EQ(values[0].item<float>(), 1e-12f);
  EXPECT_EQ(table.gather_image(at::tensor({0, 1}, at::kLong)).sizes(), at::IntArrayRef({2, 1, 1, 1}));
}

TEST(Schedule, SanaTellsTheModelWholeTimesteps) {
  const FlowTable table = sana_flow_table(1000, 3.0);
  EXPECT_EQ(table.model_t[0], 0);
  EXPECT_EQ(table.model_t[1], 2);
  EXPECT_EQ(table.model_t[2], 5);
  EXPECT_NEAR(table.sigmas[1], 3 * 0.001 / 1.002, 1e-12);
}

// min(snr, gamma) / snr for epsilon, / (snr + 1) for v, times 1 for x_0: the same loss in x_0 space.
TEST(Objective, MinSnrWeightsAgreeAcrossParameterisations) {
  const at::Tensor t = at::tensor({100, 300, 900}, at::kLong);
  const std::vector<double> bars = cumulative_alphas(iddpm_betas("linear", 1000));
  for (const char* prediction : {"epsilon", "v_prediction", "sample"}) {
    json config = {{"type", "ddpm"}, {"prediction_type", prediction}};
    const auto plain = make_objective(config);
    config["snr_gamma"] = 5.0;
    const auto weighted = make_objective(config);
    const Drawn drawn = draw(3, 4, false);
    const NoisedBatch noised = plain->add_noise(drawn.x_0, drawn.noise, t);
    const at::Tensor ratio = weighted->loss(drawn.prediction, drawn.x_0, drawn.noise, noised).loss /
                             plain->loss(drawn.prediction, drawn.x_0, drawn.noise, noised).loss;
    for (int64_t i = 0; i < 3; ++i) {
      const double bar = bars[static_cast<size_t>(t[i].item<int64_t>())], snr = bar / (1 - bar);
      const double divisor = prediction == std::string("epsilon") ? snr : prediction[0] == 'v' ? snr + 1 : 1;
      EXPECT_NEAR(ratio[i].item<float>(), std::min(snr, 5.0) / divisor, 1e-4 * std::min(snr, 5.0) / divisor);
    }
  }
}

// Stoica et al. 2025: the distance from the own target less lambda times that from another sample's.
TEST(Objective, ContrastiveFlowIsTheDifferenceOfTwoDistances) {
  for (const char* weighting : {"none", "cosmap"}) {
    json config = {{"type", "flow"}, {"weighting", weighting}};
    const auto plain = make_objective(config);
    config["contrastive_lambda"] = 0.25;
    const auto contrastive = make_objective(config);
    EXPECT_FALSE(plain->compares_samples());
    EXPECT_TRUE(contrastive->compares_samples());
    const Drawn drawn = draw(3, 4, false);
    const at::Tensor t = at::tensor({0.1f, 0.4f, 0.9f});
    NoisedBatch noised = contrastive->add_noise(drawn.x_0, drawn.noise, t);
    const auto loss_to = [&](const at::Tensor& target) {
      NoisedBatch other = noised;
      other.target = target;
      return plain->loss(drawn.prediction, drawn.x_0, drawn.noise, other).loss;
    };
    const LossTerms held_out = contrastive->loss(drawn.prediction, drawn.x_0, drawn.noise, noised);
    EXPECT_TRUE(at::equal(held_out.loss, loss_to(noised.target))) << "without another sample";
    noised.other_target = noised.target.roll(1, 0);
    const LossTerms terms = contrastive->loss(drawn.prediction, drawn.x_0, drawn.noise, noised);
    EXPECT_EQ(contrastive->term_names(), std::vector<std::string>({"mse", "contrastive"}));
    ASSERT_EQ(terms.terms.size(), 2u);
    EXPECT_TRUE(at::allclose(terms.loss, loss_to(noised.target) - 0.25 * loss_to(noised.other_target)));
    EXPECT_TRUE(
        at::allclose(terms.terms[1], (drawn.prediction - noised.other_target).square().flatten(1).mean(1)));
  }
}

TEST(Objective, BadOptionsAreNamed) {
  EXPECT_ERROR(objective_config("edm"), "iddpm, epsilon, v_prediction, x_0, flow");
  EXPECT_ERROR(make_objective({{"type", "edm"}}), "to be one of iddpm, ddpm, flow");
  EXPECT_ERROR(make_objective(json::array()), "object");
  EXPECT_ERROR(make_objective({{"type", "flow"}, {"weighting", "sigma"}}), "weighting");
  EXPECT_ERROR(make_objective({{"type", "flow"}, {"shift", -1}}), "shift");
  EXPECT_ERROR(make_objective({{"type", "flow"}, {"contrastive_lambda", 1}}),
               "contrastive_lambda from 0 to below 1, got 1");
  EXPECT_ERROR(make_objective({{"type", "ddpm"}, {"num_train_timesteps", 10}, {"trained_betas", {0.1, 0.2}}}),
               "10 trained_betas");
}

TEST(Objective, WrongChannelsAreNamed) {
  const Drawn drawn = draw(2, 4, false);
  for (const char* name : {"iddpm", "epsilon", "flow"}) {
    const auto objective = make_objective(objective_config(name));
    const NoisedBatch noised = objective->add_noise(
        drawn.x_0, drawn.noise, objective->timesteps(at::tensor({0.1, 0.2}, at::kDouble)));
    EXPECT_ERROR(objective->loss(at::zeros({2, 6, 4, 4}), drawn.x_0, drawn.noise, noised), "6");
  }
}

}  // namespace
}  // namespace kiln
