#include "train/stages/stages.h"

#include <algorithm>
#include <optional>

#include "checkpoint/train_state.h"
#include "core/error.h"
#include "core/text/some_of.h"
#include "data/images/left_out_list.h"
#include "parallel/ranks/agreement.h"
#include "run/option_values.h"
#include "train/dataset/store_data.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

// What the newest checkpoint says of a stage, done or ahead.
struct SavedStage {
  StageOptions options;  // without settings if the run had no stages
  int64_t first_step = 0, last_step = 0;
  Json settings;         // values of every option that a stage may set
  std::string identity;  // "": the stage has not begun
  std::string left_out;  // DataOptions::left_out
};
struct Saved {
  int64_t step = 0;
  std::string model;  // its name
  bool is_staged = false;
  std::vector<SavedStage> stages;
  std::string model_config;  // if the run has several stages
  Json continued_with;
};

Saved saved_from(const Json& state) {
  Saved saved{.step = state.at("step"),
              .model = state.at("options").at("model"),
              .stages = {},
              .model_config = state.at("model_config"),
              .continued_with = state.at("continued_with")};
  const Json& options = state.at("options");
  for (const Json& stage : state.at("stages"))
    saved.stages.push_back({.options = stage_from_json(stage.at("keys")),
                            .first_step = stage.at("first_step"),
                            .last_step = stage.at("last_step"),
                            .settings = stage.at("settings"),
                            .identity = stage.value("data", ""),
                            .left_out = ""});
  saved.is_staged = !saved.stages.empty();
  if (!saved.is_staged)
    saved.stages.push_back({.options = {},
                            .first_step = 0,
                            .last_step = options.at("max-steps"),
                            .settings = options,
                            .identity = state.at("data"),
                            .left_out = ""});
  for (SavedStage& stage : saved.stages) {
    Json lines = Json::array();
    for (const Json& line : state.at("left_out"))
      if (line.value("stage", int64_t{-1}) == stage.first_step) lines.push_back(line);
    stage.left_out = lines.dump();
  }
  return saved;
}

// Reads the newest checkpoint that rank 0 sees, or returns nothing if there is none. Does not check its files
// yet. A collective.
std::optional<Saved> read_saved(const std::string& out, ProcessGroup& group) {
  Json found;
  agree(group, "the stages of the run", [&] {
    if (group.rank() != 0) return;
    const std::vector<Checkpoint> checkpoints = list_checkpoints(out);
    if (checkpoints.empty()) return;
    const TrainStateInfo state = read_train_state(checkpoints.back().folder);
    found = {{"step", state.step},
             {"options", state.config.at("options")},
             {"data", state.config.at("data")},
             {"stages", state.config.value("stages", Json::array())},
             {"model_config", state.config.value("model_config", "")},
             {"continued_with", state.config.value("continued_with", Json())},
             {"left_out", read_left_out(out + "/" + kLeftOutFile)}};
  });
  found = Json::parse(group.gather(found.dump(), "the stages of the run").front());
  if (found.is_null()) return std::nullopt;
  return saved_from(found);
}

// Completes a stage that follows another. What it does not set is as in the one before, except settings of
// the data and the warm-up.
StageOptions following(const StageOptions& before, StageOptions stage) {
  nlohmann::json settings = before.settings;
  settings.erase("lr-warmup-steps");
  if (stage.settings.contains("data"))
    for (const char* name : {"more-data", "data-weights", "text", "image-size"}) settings.erase(name);
  settings.update(stage.settings);
  stage.settings = std::move(settings);
  return stage;
}

// Returns the stages that were done, up to the newest checkpoint, followed by those of --continue-with.
std::vector<StageOptions> continued(const Saved& saved, const std::vector<StageOptions>& ahead) {
  std::vector<StageOptions> stages;
  for (const SavedStage& stage : saved.stages) {
    if (stage.first_step >= saved.step) break;
    stages.push_back(stage.options);
    if (stage.last_step <= saved.step && stage.options.epochs + static_cast<double>(stage.options.steps) > 0)
      continue;
    stages.back().epochs = 0;
    stages.back().steps = std::min(saved.step, stage.last_step) - stage.first_step;
  }
  const StageOptions last = stages.back();
  for (const StageOptions& stage : ahead) stages.push_back(following(last, stage));
  return stages;
}

// Returns "lr 0.0001 -> 5e-05, epochs 4 -> 8", or "" if they are the same.
std::string differences(const StageOptions& before, const StageOptions& now) {
  const Json old_keys = to_json(before), new_keys = to_json(now);
  Json all = old_keys;
  all.update(new_keys);
  std::vector<std::string> texts;
  for (const auto& [key, value] : all.items())
    if (const Json was = old_keys.value(key, Json()), is = new_keys.value(key, Json()); was != is)
      texts.push_back(fmt::format("{} {} -> {}", key, was.is_null() ? "none" : was.dump(),
                                  is.is_null() ? "none" : is.dump()));
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string keys_text(const StageOptions& stage) {
  std::vector<std::string> texts;
  const Json keys = to_json(stage);
  for (const auto& [key, value] : keys.items()) texts.push_back(fmt::format("{} {}", key, value.dump()));
  return fmt::format("{}", fmt::join(texts, ", "));
}

// Throws Error if a stage that has begun changes what its steps depend on.
void require_unchanged(const std::string& out, const Stage& stage, const SavedStage& saved, int64_t step) {
  const bool is_done = saved.last_step <= step;
  Json before = to_json(stage.options);
  before.update(saved.settings);
  const OptionChanges changes = compare_options(before, to_json(stage.options));
  if (!changes.refused.empty())
    fail("resume",
         "{} of {} {} with other settings: {}; go back to them, or give the new ones with --continue-with "
         "FILE",
         stage.name, out, is_done ? "was done" : "is under way", some_of(changes.refused));
  if (saved.first_step != stage.first_step)
    fail("resume",
         "{} began at step {} of {} and would begin at {}: what is done cannot change, give --recipe "
         "{}/config.toml",
         stage.name, saved.first_step, out, stage.first_step, out);
}

class StagePlanner {
 public:
  StagePlanner(const TrainOptions& run, const std::vector<StageOptions>& ahead, std::optional<Saved> saved)
      : run_(run), saved_(std::move(saved)) {
    if (saved_) {
      plan_.continued_with = saved_->continued_with;
      plan_.model_config = saved_->model_config;
    }
    is_continued_ = !ahead.empty();
    if (is_continued_) continue_with(ahead);
    plan_.run = run_;
    plan_.step = saved_ ? saved_->step : 0;
  }

  StagePlan plan() {
    // First, since what follows would look for the saved run's data in the terms of another model.
    if (saved_ && saved_->model != run_.model.name)
      fail("resume", "{} holds a run of {}, not of {}: give --model {}, or another --out", run_.out,
           saved_->model, run_.model.name, saved_->model);
    const size_t count = std::max<size_t>(run_.stages.size(), 1);
    for (size_t i = 0; i < count; ++i) try {
        add_stage(i);
      } catch (const Error& error) {
        if (!is_staged()) throw;
        throw Error(fmt::format("{} ({})", error.what(), stage_name(run_.stages[i], i)));
      }
    if (saved_) check_history();
    while (!plan_.is_last() && plan_.step >= plan_.stage().last_step()) ++plan_.current;
    return std::move(plan_);
  }

 private:
  void continue_with(const std::vector<StageOptions>& ahead) {
    if (!saved_)
      fail("train", "--continue-with: {} has no checkpoint to go on from: train it first", run_.out);
    Json asked = Json::array();
    for (const StageOptions& stage : ahead) asked.push_back(to_json(stage));
    // Running the same command again resumes what it began.
    const bool is_known = saved_->continued_with == asked;
    run_.stages.clear();
    if (is_known)
      for (const SavedStage& stage : saved_->stages) run_.stages.push_back(stage.options);
    else
      run_.stages = continued(*saved_, ahead);
    run_.epochs = 0;
    run_.max_steps = TrainOptions().max_steps;
    plan_.continued_with = std::move(asked);
    if (is_known) return;
    const SavedStage& cut =
        saved_->stages[std::min(run_.stages.size() - ahead.size(), saved_->stages.size()) - 1];
    if (cut.last_step > saved_->step)
      plan_.changes.push_back(fmt::format("{} ends here, at step {} of {}",
                                          stage_name(cut.options, run_.stages.size() - ahead.size() - 1),
                                          saved_->step, cut.last_step));
  }

  void add_stage(size_t index) {
    Stage stage{.name = run_.stages.empty() ? "the run" : stage_name(run_.stages[index], index),
                .options = options_of_stage(run_, index),
                .first_step = index == 0 ? 0 : plan_.stages.back().last_step()};
    if (index > 0) stage.options.model.config = plan_.model_config;
    const bool has_begun = saved_ && (index == 0 || stage.first_step < saved_->step);
    const SavedStage* saved = has_begun && index < saved_->stages.size() ? &saved_->stages[index] : nullptr;
    if (saved) stage.identity = saved->identity;
    if (saved && saved->last_step <= saved_->step && !is_here(stage.options.data)) {
      // The stage is done and no longer needs its data.
      stage.options.max_steps = saved->last_step;
      stage.options.epochs = 0;
      return plan_.stages.push_back(std::move(stage));
    }
    if (saved) stage.options.data.left_out = saved->left_out;
    const int64_t grown_to = saved ? keep_data(stage) : 0;
    if (is_staged() || stage.options.epochs > 0) stage.num_samples = samples_of(stage.options);
    if (is_staged() && run_.stages[index].steps > 0) stage.options.max_steps = run_.stages[index].steps;
    stage.options = with_length(std::move(stage.options), stage.num_samples);
    stage.options.max_steps += stage.first_step;
    if (grown_to > 0 && stage.last_step() > saved_->step)
      plan_.notes.push_back(
          fmt::format("{} goes on with the {} samples that it began with; its data have grown to {}, which a "
                      "further [[stage]] takes",
                      stage.name, samples_of(stage.options), grown_to));
    if (index == 0 && run_.stages.size() > 1 && plan_.model_config.empty())
      plan_.model_config = model_config_of(stage.options).dump();
    plan_.stages.push_back(std::move(stage));
  }

  // Keeps the parts that a store had when the stage began, though it may have grown since. Returns the
  // samples that there are now, or 0 if there are no more than then.
  static int64_t keep_data(Stage& stage) {
    const auto parts = parts_of_identity(stage.options, stage.identity);
    if (!parts) return 0;  // resuming says what differs
    const int64_t all = samples_of(stage.options);
    stage.options.data.parts = *parts;
    return samples_of(stage.options) == all ? 0 : all;
  }

  void check_history() {
    const int64_t step = saved_->step;
    if (saved_->is_staged && !is_staged())
      fail("resume", "{} is a run of {} stages and this command gives none: give --recipe {}/config.toml",
           run_.out, saved_->stages.size(), run_.out);
    if (!is_staged()) return;
    std::vector<std::string> ahead;
    for (size_t i = 0; i < std::max(plan_.stages.size(), saved_->stages.size()); ++i) {
      const SavedStage* before = i < saved_->stages.size() ? &saved_->stages[i] : nullptr;
      const Stage* now = i < plan_.stages.size() ? &plan_.stages[i] : nullptr;
      const bool had_begun = before && before->first_step < step;
      if (had_begun && !now)
        fail("resume", "stage {} of {} has begun and is not in this recipe: give --recipe {}/config.toml",
             i + 1, run_.out, run_.out);
      if (had_begun) {
        require_unchanged(run_.out, *now, *before, step);
        const int64_t least = std::min(step, before->last_step);
        const bool is_past = before->last_step < step;
        if (now->last_step() < least || (is_past && now->last_step() != before->last_step))
          fail("resume",
               "{} of {} ended at step {} and would end at {}: what is done cannot change, give --recipe "
               "{}/config.toml",
               now->name, run_.out, least, now->last_step(), run_.out);
        if (now->last_step() != before->last_step && before->last_step >= step && !is_continued_)
          ahead.push_back(fmt::format("{} ends at step {} instead of {}", now->name, now->last_step(),
                                      before->last_step));
      } else if (now && !before) {
        ahead.push_back(fmt::format("{} follows: {}", now->name, keys_text(run_.stages[i])));
      } else if (before && !now) {
        ahead.push_back(fmt::format("stage {} is left out", i + 1));
      } else {
        if (const std::string changed = differences(before->options, run_.stages[i]); !changed.empty())
          ahead.push_back(fmt::format("{}: {}", now->name, changed));
      }
    }
    plan_.changes.insert(plan_.changes.end(), ahead.begin(), ahead.end());
  }
  bool is_staged() const { return !run_.stages.empty(); }

  TrainOptions run_;
  std::optional<Saved> saved_;
  bool is_continued_ = false;
  StagePlan plan_;
};

}  // namespace

void StagePlan::record(Json& config, const std::string& identity) const {
  if (!is_staged()) return;
  Json records = Json::array();
  for (size_t i = 0; i < stages.size(); ++i) {
    records.push_back({{"keys", to_json(run.stages[i])},
                       {"first_step", stages[i].first_step},
                       {"last_step", stages[i].last_step()},
                       {"settings", stage_settings(stages[i].options)}});
    if (i <= current) records.back()["data"] = i == current ? identity : stages[i].identity;
  }
  config["stages"] = records;
  config["model_config"] = model_config;
  if (!continued_with.is_null()) config["continued_with"] = continued_with;
}

StagePlan plan_stages(const TrainOptions& run, const std::vector<StageOptions>& ahead, ProcessGroup& group) {
  std::optional<Saved> saved = read_saved(run.out, group);
  StagePlan plan;
  agree(group, "the stages of the run", [&] { plan = StagePlanner(run, ahead, std::move(saved)).plan(); });
  return plan;
}

}  // namespace kiln
