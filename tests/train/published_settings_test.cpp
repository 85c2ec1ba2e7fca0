#include "run/published_settings.h"

#include <iterator>

#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "models/registry.h"
#include "run/option_values.h"
#include "test_files.h"
#include "train/settings.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using nlohmann::json, test::usable_options;

TrainOptions options_of_model(const std::string& model, const char* changes = "") {
  TrainOptions options = changed(usable_options(), changes);
  options.model.name = model;
  return options;
}

json objective_of(const std::string& model) { return published_objective_config(model, ""); }

TEST(PublishedSettings, AModelAloneIsTrainedAsItsAuthorsDid) {
  const json sd15 = objective_of("sd15"), sd21 = objective_of("sd21-v");
  for (const json& one : {sd15, sd21}) {
    EXPECT_EQ(one.at("beta_schedule"), "scaled_linear");
    EXPECT_EQ(one.at("beta_start"), 0.00085);
    EXPECT_EQ(one.at("beta_end"), 0.012);
  }
  EXPECT_EQ(sd15.at("prediction_type"), "epsilon");
  EXPECT_EQ(sd21.at("prediction_type"), "v_prediction");
  for (const char* model : {"DiT-XL/2", "PixArt-Sigma-XL/2-1024", "pixart_diffusers"}) {
    EXPECT_EQ(objective_of(model).at("type"), "iddpm") << model;
    EXPECT_EQ(objective_of(model).at("beta_schedule"), "linear") << model;
  }
  EXPECT_EQ(objective_of("Sana-1600M").at("shift"), 3.0);
  EXPECT_EQ(objective_of("Sana-1600M").at("timestep_sampling"), "logit_normal");
}

TEST(PublishedSettings, EveryFamilyHasAnObjectiveAndASamplerThatFitsIt) {
  for (const std::string& name : denoiser_names()) {
    const json objective = objective_of(name);
    const Drawing drawing = published_drawing(name, objective);
    EXPECT_TRUE(samples(drawing.sampler, objective)) << name;
    EXPECT_NO_THROW(make_sampler(sampler_config(drawing.sampler, drawing.num_sampling_steps, objective)))
        << name;
    ASSERT_NE(row_of(family_of(name).sampling, name), nullptr) << name;
    EXPECT_EQ(drawing.sampler, row_of(family_of(name).sampling, name)->sampler) << name;
  }
}

TEST(PublishedSettings, TheDocumentationHasThem) {
  const std::string page = read_bytes(KILN_SOURCE_DIR "/docs/objectives.md");
  for (const Family& family : denoiser_families()) {
    EXPECT_THAT(page, HasSubstr("`" + std::string(family.name) + "`"));
    for (const PublishedSampling& row : family.sampling)
      EXPECT_THAT(page, HasSubstr(fmt::format("`{}`, {} steps, guidance {:g}", row.sampler, row.steps,
                                              row.cfg_scale)));
    for (const PublishedObjective& row : family.objectives) {
      const json options = json::parse(row.options);
      for (const auto& [name, value] : options.items())
        EXPECT_THAT(page, HasSubstr(fmt::format(
                              "--{} {}", name, value.is_string() ? value.get<std::string>() : value.dump())));
    }
  }
}

TEST(PublishedSettings, WhatIsGivenWins) {
  TrainOptions options = options_of_model("sd15", "objective=v_prediction");
  EXPECT_THAT(take_published_settings(options, {"objective"}), HasSubstr("--beta-schedule scaled_linear"));
  EXPECT_EQ(options.objective.name, "v_prediction");
  EXPECT_EQ(options.objective.beta_start, 0.00085);

  options = options_of_model("sd15", "beta-end=0.02");
  take_published_settings(options, {"beta-schedule", "beta-end"});
  EXPECT_EQ(options.objective.name, "epsilon");
  EXPECT_EQ(options.objective.beta_schedule, BetaSchedule::kLinear);
  EXPECT_EQ(options.objective.beta_start, 0.00085);
  EXPECT_EQ(options.objective.beta_end, 0.02);

  options = options_of_model("DiT-S/2", "objective=flow");  // whose published schedule is not that of a flow
  EXPECT_EQ(take_published_settings(options, {"objective"}), "");
  EXPECT_EQ(options.objective.flow_shift, 1);
}

TEST(PublishedSettings, ARunThatResumesKeepsItsOwn) {
  TrainOptions options = options_of_model("Sana-600M");
  const json recorded = {{"objective", "flow"}, {"flow-shift", 1.0}, {"timestep-sampling", "uniform"}};
  EXPECT_EQ(take_published_settings(options, {}, recorded), "--objective flow --timestep-sampling uniform");
  EXPECT_EQ(options.objective.flow_shift, 1);
  EXPECT_EQ(options.objective.flow_times, FlowTimes::kContinuous);
}

TEST(PublishedSettings, ARunThatResumesDrawsAsItDid) {
  TrainOptions options = options_of_model("DiT-S/2", "sample-every=10");
  json recorded =
      settings("objective=iddpm sample-every=10000000000 sampler= num-sampling-steps=50 cfg-scale=4.0");
  take_published_settings(options, {}, recorded);
  EXPECT_EQ(options.samples.sampler, "");
  EXPECT_EQ(options.samples.num_sampling_steps, 50);
  recorded["sample-every"] = 0;  // it has drawn nothing so far
  take_published_settings(options, {}, recorded);
  EXPECT_EQ(options.samples.sampler, "ddpm");
  EXPECT_EQ(options.samples.num_sampling_steps, 250);
}

// Reads a command back as kiln train does: what it leaves open, the model brings.
TrainOptions read_back(const std::string& line) {
  std::istringstream words(line);
  std::string name, value;
  words >> name >> name;  // kiln train
  TrainOptions options;
  std::set<std::string> given;
  while (words >> name >> value) {
    const json number = json::parse(value, nullptr, /*allow_exceptions=*/false);
    name.erase(0, 2);
    given.insert(name);
    set_option(options, name, number.is_number() ? number : json(value == "''" ? "" : value));
  }
  if (!given.contains("image-size")) options.data.image_size = own_image_size(options.model);
  take_published_settings(options, given);
  return options;
}

TEST(CommandLine, IsReadBackAsTheSameOptions) {
  const std::vector<json> cases = {
      json::object(),
      {{"objective", "flow"}},
      {{"objective", "epsilon"}, {"beta-schedule", "linear"}},
      {{"flow-shift", 1.0}},
      {{"sample-every", 10}},
      {{"evaluate-every", 10}, {"cfg-scale", 1.0}, {"num-sampling-steps", 50}},
      {{"sample-every", 10}, {"sampler", "ddim"}},
      {{"sample-every", 10}, {"objective", "flow"}, {"sampler", "flow_heun"}, {"num-sampling-steps", 9}},
      {{"image-size", 128}},
  };
  for (const std::string& model : denoiser_names())
    for (const json& settings : cases)
      for (const bool is_published : {true, false}) {
        TrainOptions options;
        options.model.name = model;
        if (is_published) options.data.image_size = own_image_size(options.model);
        options = changed(options, settings);
        std::set<std::string> given;
        for (const auto& [name, value] : settings.items()) given.insert(name);
        if (is_published) take_published_settings(options, given);
        const std::string line = command_line(options);
        EXPECT_EQ(to_json(read_back(line)), to_json(options)) << line;
      }
}

TEST(PublishedSettings, GridsAndEvaluationsAreDrawnAsTheAuthorsDraw) {
  TrainOptions options = options_of_model("PixArt-Sigma-XL/2-512");
  take_published_settings(options, {});
  EXPECT_EQ(options.samples.sampler, "") << "nothing is drawn";
  options.evaluation.every = 10;
  EXPECT_EQ(take_published_settings(options, {}),
            "--cfg-scale 4.5 --num-sampling-steps 20 --sampler dpmpp_2m");

  options = options_of_model("DiT-B/4", "sample-every=10 sampler=dpmpp_2m");
  EXPECT_EQ(take_published_settings(options, {"sampler"}), "") << "nobody published it";
  EXPECT_EQ(options.samples.num_sampling_steps, usual_sampling_steps("dpmpp_2m"))
      << "250 steps are those of the published sampler";

  // Its sampler cannot draw with what was trained as a flow.
  options = options_of_model("DiT-B/4", "sample-every=10 objective=flow");
  take_published_settings(options, {"objective"});
  EXPECT_EQ(options.samples.sampler, "flow_euler");
}

TEST(PublishedSettings, UnknownNamesAreLeftToOthers) {
  TrainOptions options = options_of_model("DiT,Sana");
  EXPECT_EQ(take_published_settings(options, {}), "");
  options = options_of_model("sd15", "objective=epsilo sample-every=1");
  EXPECT_EQ(take_published_settings(options, {"objective"}), "");
}

TEST(PublishedSettings, FlowTakesItsTimesFromATable) {
  ObjectiveOptions options;
  options.name = "flow";
  options.flow_shift = 3;
  options.flow_times = FlowTimes::kSana;
  EXPECT_EQ(objective_config_of(options).at("mode"), "sana");
  options.name = "epsilon";
  EXPECT_THROW(objective_config_of(options), Error);
}

}  // namespace
}  // namespace kiln
