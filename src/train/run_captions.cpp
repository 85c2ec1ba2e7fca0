#include "train/run_evaluation.h"

#include "checkpoint/train_state.h"
#include "core/error.h"
#include "data/images/image_dataset.h"
#include "data/store/sample_order.h"
#include "models/model_record.h"
#include "run/option_values.h"
#include "run/stage_options.h"
#include "train/encoding/encoded_captions.h"
#include "train/setup.h"

namespace kiln {

namespace {

// Returns the options of the stage that the newest checkpoint of a run belongs to.
TrainOptions newest_options(const std::string& run) {
  const std::vector<Checkpoint> checkpoints = list_checkpoints(run);
  if (checkpoints.empty()) fail("evaluate", "{} has no complete checkpoint yet", run);
  const TrainStateInfo saved = read_train_state(checkpoints.back().folder);
  TrainOptions options;
  for (const auto& [name, value] : saved.config.at("options").items()) set_option(options, name, value);
  size_t newest = 0;
  for (const auto& stage : saved.config.value("stages", nlohmann::json::array())) {
    if (stage.at("first_step").get<int64_t>() < saved.step) newest = options.stages.size();
    options.stages.push_back(stage_from_json(stage.at("keys")));
  }
  return options_of_stage(options, newest);
}

// Returns `count` of `samples`, evenly spread, or all if there are no more.
std::vector<int64_t> spread(const std::vector<int64_t>& samples, int64_t count) {
  const auto all = static_cast<int64_t>(samples.size());
  if (count >= all) return samples;
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < count; ++i) chosen.push_back(samples[static_cast<size_t>(i * all / count)]);
  return chosen;
}

// Returns the samples of [0, size) that the validation holds out, or all if it holds none out.
template <class Name>
std::vector<int64_t> judged_samples(const TrainOptions& options, int64_t size, const Name& name_of) {
  const double share = options.validation.share;
  std::vector<int64_t> samples;
  for (int64_t id = 0; id < size; ++id)
    if (share == 0 || is_held_out(name_of(id), share)) samples.push_back(id);
  return samples;
}

std::vector<std::string> captions_of_store(const TrainOptions& options, int64_t count) {
  const auto text = describe(options).text;
  const auto store = open_sources(StoredData{options.data}.stores());
  const std::string_view prefix = text->info().prefix, suffix = text->info().suffix;
  std::vector<std::string> captions;
  for (const int64_t id : spread(
           judged_samples(options, store->size(), [&](int64_t sample) { return store->sample_name(sample); }),
           count)) {
    std::string_view caption = text->text(text->entry(id, 0));
    if (caption.starts_with(prefix)) caption.remove_prefix(prefix.size());
    if (caption.ends_with(suffix)) caption.remove_suffix(suffix.size());
    if (!caption.empty()) captions.emplace_back(caption);
  }
  return captions;
}

std::vector<std::string> captions_of_pictures(const TrainOptions& options, int64_t count) {
  const auto images = ImageDataset::open(options.data.path);
  CaptionOptions bare = text_options_of(options.data).captions;
  bare.prefix = bare.suffix = "";
  std::vector<std::string> captions;
  for (const int64_t id : spread(judged_samples(options, static_cast<int64_t>(images->records().size()),
                                                [&](int64_t sample) {
                                                  return images->records()[static_cast<size_t>(sample)].name;
                                                }),
                                 count))
    if (const std::vector<Caption> found = captions_of(*images, id, bare); !found.empty())
      captions.push_back(found.front().text);
  return captions;
}

}  // namespace

RunCaptions captions_of_run(const std::string& run, int64_t count) {
  if (read_run_info(run).text.encoder.empty()) return {};
  TrainOptions options = newest_options(run);
  RunCaptions found{.texts = {}, .origin = "captions of the training data " + options.data.path};
  if (options.validation.share > 0) {
    found.origin = fmt::format("captions that --validation-share {:g} holds out of {}",
                               options.validation.share, options.data.path);
  } else if (options.validation.is_on()) {
    options.data = held_out_options(std::move(options.data), options.validation);
    found.origin = "captions of --validation-data " + options.data.path;
  }
  options.data.weights.clear();  // each sample once
  options.data.parts.clear();
  if (!is_here(options.data))
    fail("evaluate",
         "the prompts of {} are {}, which do not exist any more: give --prompts FILE with one prompt a line",
         run, found.origin);
  found.texts = reads_pictures(source_of(options.data)) ? captions_of_pictures(options, count)
                                                        : captions_of_store(options, count);
  if (found.texts.empty())
    fail("evaluate",
         "the prompts of {} are {}, but there are none: give --prompts FILE with one prompt a line", run,
         found.origin);
  return found;
}

}  // namespace kiln
