// Samplers: the registry, the pairs with objectives, and where they end. Steps are compared with other
// implementations in tests/reference/test_sampler.py.
#include "diffusion/sampler.h"
#include "core/aten.h"

#include <algorithm>
#include <cmath>

#include "diffusion/objective.h"
#include "diffusion/samplers/iddpm_sampler.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/schedule.h"
#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

TEST(Sampler, RegistryListsEveryName) {
  EXPECT_THAT(sampler_names(), ElementsAre("ddpm", "ddim", "dpmpp_2m", "unipc", "euler", "euler_ancestral",
                                           "pndm", "pixart_dpms", "flow_euler"));
}

// Which sampler fits which objective: the table of docs/samplers.md.
bool fits(const std::string& sampler, const std::string& objective) {
  if (objective == "flow") return sampler == "flow_euler" || sampler == "dpmpp_2m" || sampler == "unipc";
  return sampler != "flow_euler";
}

// What a model trained to perfection says, if all pictures are Gaussian: x_0 ~ N(mean, deviation^2) in each
// pixel.
DenoiseFn gaussian_model(const std::string& objective, double mean, double deviation) {
  return [=](const at::Tensor& x, double model_t) {
    double alpha, sigma;
    if (objective == "flow") {
      sigma = model_t / 1000;
      alpha = 1 - sigma;
    } else {
      // Between timesteps, where pixart_dpms steps, the logarithm is interpolated.
      static const std::vector<double> bars = cumulative_alphas(iddpm_betas("linear", 1000));
      const size_t low = std::min<size_t>(static_cast<size_t>(std::max(model_t, 0.0)), bars.size() - 2);
      const double part = model_t - static_cast<double>(low);
      const double bar = std::exp((1 - part) * std::log(bars[low]) + part * std::log(bars[low + 1]));
      alpha = std::sqrt(bar);
      sigma = std::sqrt(1 - bar);
    }
    const double variance = alpha * alpha * deviation * deviation + sigma * sigma;
    const at::Tensor residual = x - alpha * mean;
    const at::Tensor x_0 = mean + (alpha * deviation * deviation / variance) * residual;
    const at::Tensor epsilon = (sigma / variance) * residual;
    if (objective == "flow") return epsilon - x_0;
    if (objective == "x_0") return x_0;
    if (objective == "v_prediction") return alpha * epsilon - sigma * x_0;
    if (objective == "epsilon") return epsilon;
    return at::cat({epsilon, at::zeros_like(epsilon)}, 1);  // iddpm: the variance between its bounds
  };
}

struct Pair {
  std::string sampler, objective;
};
std::vector<Pair> fitting_pairs() {
  std::vector<Pair> pairs;
  for (const std::string& sampler : sampler_names())
    for (const std::string& objective : objective_names())
      if (fits(sampler, objective)) pairs.push_back({sampler, objective});
  return pairs;
}

class FittingPair : public ::testing::TestWithParam<Pair> {};
INSTANTIATE_TEST_SUITE_P(Pairs, FittingPair, ::testing::ValuesIn(fitting_pairs()),
                         [](const auto& info) { return info.param.sampler + "_" + info.param.objective; });

at::Tensor sample(const Pair& pair, int64_t steps, const DenoiseFn& denoise, const at::Tensor& noise) {
  const auto sampler = make_sampler(sampler_config(pair.sampler, steps, objective_config(pair.objective)));
  const int64_t more = pair.sampler == "pndm" && steps > 1 ? 1 : 0;  // its first step takes two calls
  EXPECT_EQ(static_cast<int64_t>(sampler->timesteps().size()), steps + more);
  return run_sampler(*sampler, noise, denoise, [&](int64_t) { return at::randn_like(noise); });
}

// If all pictures are one picture, every sampler ends at it.
TEST_P(FittingPair, EndsAtTheOnlyPicture) {
  at::manual_seed(1);
  for (int64_t steps : {1, 2, 7, 50}) {
    if (GetParam().sampler == "pixart_dpms" && steps == 1) continue;  // it refuses one step
    // Linear multistep formulas on a prediction that is not constant along the path: few steps are coarse.
    if (GetParam().sampler == "pndm" && GetParam().objective == "v_prediction" && steps < 50) continue;
    const at::Tensor x =
        sample(GetParam(), steps, gaussian_model(GetParam().objective, 0.3, 0), at::randn({2, 3, 4, 4}));
    const double allowed = GetParam().sampler == "pixart_dpms" ? 5e-2 : 2e-2;  // it stops at t = 1 of 1000
    EXPECT_LT((x - 0.3).abs().max().item<double>(), allowed) << steps << " steps";
  }
}

TEST_P(FittingPair, ReproducesTheSpreadOfThePictures) {
  at::manual_seed(2);
  const at::Tensor x =
      sample(GetParam(), 200, gaussian_model(GetParam().objective, -0.4, 0.7), at::randn({64, 3, 8, 8}));
  EXPECT_NEAR(x.mean().item<double>(), -0.4, 0.03);
  EXPECT_NEAR(x.std().item<double>(), 0.7, 0.03);
}

TEST(Sampler, SecondOrderNeedsFewerSteps) {
  at::manual_seed(3);
  const at::Tensor noise = at::randn({16, 3, 8, 8});
  const auto error = [&](const char* sampler, const char* objective) {
    const Pair pair{sampler, objective};
    const DenoiseFn model = gaussian_model(objective, 0.2, 0.5);
    return (sample(pair, 40, model, noise) - sample(pair, 900, model, noise)).abs().mean().item<double>();
  };
  EXPECT_LT(error("dpmpp_2m", "epsilon"), 0.5 * error("ddim", "epsilon"));
  EXPECT_LT(error("dpmpp_2m", "flow"), 0.5 * error("flow_euler", "flow"));
}

TEST(Sampler, ImpossiblePairsSayWhatFits) {
  for (const std::string& sampler : sampler_names())
    for (const std::string& objective : objective_names()) {
      if (fits(sampler, objective)) continue;
      const std::string message =
          message_of([&] { sampler_config(sampler, 10, objective_config(objective)); });
      EXPECT_THAT(message, has_all(sampler, objective == "flow" ? "dpmpp_2m or unipc or flow_euler"
                                                                : "ddpm or ddim or dpmpp_2m"));
    }
}

TEST(Sampler, BadOptionsAreNamed) {
  const json epsilon = objective_config("epsilon");
  EXPECT_ERROR(sampler_config("heun", 10, epsilon),
               "ddpm, ddim, dpmpp_2m, unipc, euler, euler_ancestral, pndm, pixart_dpms, flow_euler");
  EXPECT_ERROR(sampler_config("ddim", 0, epsilon), "--num-sampling-steps");
  EXPECT_ERROR(make_sampler(sampler_config("ddim", 1001, epsilon)), "1000");
  EXPECT_ERROR(make_sampler(sampler_config("ddpm", 1001, objective_config("iddpm"))), "1001");
  EXPECT_ERROR(make_sampler(sampler_config("dpmpp_2m", 1000, epsilon)), "too many");
  EXPECT_ERROR(make_sampler({{"type", "euler_a"}}), "dpmpp");
}

// A type added to the registry must be added to the list below too.
TEST(Sampler, EveryTypeIsStochasticOrNot) {
  EXPECT_ERROR(make_sampler({{"type", "none"}}),
               "one of iddpm, iddpm_ddim, ddim, ddpm, flow_euler, dpmpp, euler, euler_ancestral, "
               "unipc, pndm, pixart_dpms, got");
  const json scheduler = json::object();
  const std::vector<std::pair<json, bool>> configs = {
      {{{"type", "iddpm"}, {"steps", "5"}}, true},
      {{{"type", "iddpm_ddim"}, {"steps", "5"}, {"eta", 0.0}}, false},
      {{{"type", "iddpm_ddim"}, {"steps", "5"}, {"eta", 0.5}, {"learn_sigma", false}}, true},
      {{{"type", "ddim"}, {"steps", 5}}, false},
      {{{"type", "ddim"}, {"steps", 5}, {"eta", 1.0}}, true},
      {{{"type", "ddpm"}, {"steps", 5}}, true},
      {{{"type", "flow_euler"}, {"steps", 5}}, false},
      {{{"type", "dpmpp"}, {"steps", 5}}, false},
      {{{"type", "pixart_dpms"}, {"steps", 5}}, false},
      {{{"type", "dpmpp"}, {"steps", 5}, {"scheduler", {{"algorithm_type", "sde-dpmsolver++"}}}}, true},
      {{{"type", "euler"}, {"steps", 5}}, false},
      {{{"type", "euler_ancestral"}, {"steps", 5}}, true},
      {{{"type", "unipc"}, {"steps", 5}}, false},
      {{{"type", "pndm"}, {"steps", 5}}, false},
  };
  for (const auto& [config, stochastic] : configs) {
    const auto sampler = make_sampler(config);
    EXPECT_EQ(sampler->stochastic(), stochastic) << config;
    // A deterministic sampler asks for no noise; a stochastic one for none at its clean end.
    std::vector<int64_t> asked;
    const int64_t channels =
        config.at("type") == "iddpm" || (config.at("type") == "iddpm_ddim" && !stochastic) ? 2 : 1;
    run_sampler(
        *sampler, at::ones({1, 1, 2, 2}),
        [&](const at::Tensor&, double) {
          return at::zeros({1, channels, 2, 2});
        },
        [&](int64_t step) {
          asked.push_back(step);
          return at::zeros({1, 1, 2, 2});
        });
    if (stochastic)
      EXPECT_THAT(asked, ElementsAre(0, 1, 2, 3)) << config;
    else
      EXPECT_THAT(asked, ElementsAre()) << config;
  }
}

// From a picture noised to where any of its steps begins, a sampler goes on as from noise: if all pictures
// are one picture, it ends at that, whatever it started from.
TEST_P(FittingPair, StartsFromAPictureAtAnyStep) {
  at::manual_seed(4);
  const at::Tensor picture = at::rand({2, 3, 4, 4}) - 0.5;
  json config = sampler_config(GetParam().sampler, 50, objective_config(GetParam().objective));
  for (int64_t first : {0, 1, 20, 47}) {
    config["first_step"] = first;
    const auto sampler = make_sampler(config);
    EXPECT_EQ(sampler->step_count(), 50 - first);
    const at::Tensor x = run_sampler_from(*sampler, sampler->noised(picture, at::randn_like(picture)),
                                          gaussian_model(GetParam().objective, 0.3, 0), [&](int64_t step) {
                                            EXPECT_LT(step, 50 - first);
                                            return at::randn_like(picture);
                                          });
    EXPECT_LT((x - 0.3).abs().max().item<double>(), 6e-2) << "from step " << first;
  }
  // A model that knows this one picture leaves it where it is: the levels of noised() and the steps agree.
  config["first_step"] = 20;
  const auto sampler = make_sampler(config);
  const at::Tensor flat = at::full({2, 3, 4, 4}, 0.3), noise = at::randn_like(flat);
  const at::Tensor x = sampler->noised(flat, noise);
  const at::Tensor output =
      gaussian_model(GetParam().objective, 0.3, 0)(sampler->model_input(0, x), sampler->timesteps()[0]);
  const std::string& objective = GetParam().objective;
  if (objective == "epsilon" || objective == "iddpm") {
    EXPECT_LT((output.narrow(1, 0, 3) - noise).abs().max().item<double>(), 5e-3);
  }
  if (objective == "flow") {
    EXPECT_LT((output - (noise - flat)).abs().max().item<double>(), 5e-3);
  }
}

TEST(Sampler, StrengthIsRoundedAsDiffusersRoundsIt) {
  const json epsilon = objective_config("epsilon"), flow = objective_config("flow");
  EXPECT_EQ(first_step_of(0.75, 50, epsilon), 13);  // 37.5 steps: 37
  EXPECT_EQ(first_step_of(0.75, 50, flow), 12);     // 38
  EXPECT_EQ(first_step_of(1, 50, flow), 0);
  EXPECT_EQ(first_step_of(0.8, 20, epsilon), 4);
  for (const double strength : {0.0, -1.0, 1.01, std::nan("")})
    EXPECT_ERROR(first_step_of(strength, 50, epsilon), "--strength");
  EXPECT_ERROR(first_step_of(0.01, 50, epsilon), "leaves none of 50 steps");
  EXPECT_ERROR(make_sampler({{"type", "ddim"}, {"steps", 5}, {"first_step", 5}}),
               "expected first_step to be 0 to 4, got 5");
  EXPECT_ERROR(make_sampler({{"type", "pndm"}, {"steps", 9}, {"first_step", 6}}),
               "without skip_prk_steps, got 3");
}

TEST(Sampler, MultistepHistoryStartsAnew) {
  const auto sampler = make_sampler({{"type", "dpmpp"}, {"steps", 20}});
  const at::Tensor noise = at::ones({1, 1, 2, 2});
  const DenoiseFn denoise = [](const at::Tensor& x, double t) { return x * 0.9 + t * 1e-4; };
  const at::Tensor first = run_sampler(*sampler, noise, denoise, {});
  EXPECT_TRUE(at::equal(run_sampler(*sampler, noise, denoise, {}), first));
}

TEST(Respacing, RoundsHalfToEven) {
  EXPECT_THAT(respaced_timesteps(1000, "3"), ElementsAre(0, 500, 999));  // 499.5
  EXPECT_THAT(respaced_timesteps(4, "3"), ElementsAre(0, 2, 3));         // 1.5
  EXPECT_THAT(respaced_timesteps(6, "3"), ElementsAre(0, 2, 5));         // 2.5
  EXPECT_THAT(respaced_timesteps(300, "2,1,3"), ElementsAre(0, 99, 100, 200, 250, 299));
  EXPECT_THAT(respaced_timesteps(7, "2,2,2"), ElementsAre(0, 2, 3, 4, 5, 6));  // 7 = 3 + 2 + 2
  EXPECT_THAT(respaced_timesteps(3, ""), ElementsAre(0, 1, 2));
}

TEST(Spacing, TrailingRoundsAsNumpyDoes) {
  const json config = {{"timestep_spacing", "trailing"}};
  const JsonConfig scheduler("test", config);
  EXPECT_THAT(spaced_timesteps(scheduler, 3, "leading"), ElementsAre(999, 666, 332));
  for (int64_t steps = 1; steps <= 1000; ++steps) {
    const std::vector<int64_t> timesteps = spaced_timesteps(scheduler, steps, "leading");
    ASSERT_EQ(static_cast<int64_t>(timesteps.size()), steps);
    EXPECT_EQ(timesteps.front(), 999);
  }
}

}  // namespace
}  // namespace kiln
