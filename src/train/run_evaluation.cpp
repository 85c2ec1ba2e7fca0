#include "train/run_evaluation.h"

#include <cstring>

#include "checkpoint/train_state.h"
#include "core/aten.h"
#include "core/choices.h"
#include "core/error.h"
#include "core/tensors.h"
#include "evaluate/evaluation.h"
#include "evaluate/protocol.h"
#include "models/model_record.h"
#include "run/option_values.h"
#include "run/stage_options.h"
#include "train/dataset/sample_captions.h"
#include "train/sample_grid.h"
#include "train/setup.h"

namespace kiln {

namespace {

at::Tensor as_batch(const std::vector<Image>& images) {
  const Image& first = images.front();
  at::Tensor pictures =
      at::empty({static_cast<int64_t>(images.size()), first.height, first.width, 3}, at::kByte);
  for (size_t i = 0; i < images.size(); ++i)
    std::memcpy(pictures.mutable_data_ptr<uint8_t>() + i * first.rgb.size(), images[i].rgb.data(),
                first.rgb.size());
  return pictures.permute({0, 3, 1, 2}).contiguous();
}

// Returns the crop of the reference's pictures. Those of a folder are cropped to the run's size, those of an
// .npz are taken as they are.
int64_t reference_crop(const TrainOptions& options) {
  return options.evaluation.reference.ends_with(".npz") ? 0 : options.data.image_size;
}

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

}  // namespace

RunEvaluation::RunEvaluation(const TrainOptions& options, ProcessGroup& group, at::Device device)
    : net_(load_feature_net(options.evaluation.net, options.evaluation.net_weights, "", device)),
      choice_(choose_metrics(feature_net_kind(options.evaluation.net), {})) {
  // One split: a score over few pictures in ten splits says nothing.
  choice_.splits = 1;
  const std::string& path = options.evaluation.reference;
  if (path.empty()) fail("train", "--evaluate-every needs --evaluate-reference, the pictures to judge by");
  reference_ = measure_reference(path, reference_crop(options), *net_, choice_, {}, group);
}

std::vector<at::Tensor> RunEvaluation::tensors() const {
  std::vector<at::Tensor> tensors = net_->weights();
  for (const auto& statistics : {reference_.gaussian, reference_.spatial})
    if (statistics) tensors.insert(tensors.end(), {statistics->mu, statistics->sigma});
  if (reference_.features.defined()) tensors.push_back(reference_.features);
  return tensors;
}

std::optional<nlohmann::json> RunEvaluation::run(const TrainOptions& options, const GridSource& source,
                                                 const std::function<bool()>& stop) const {
  const Training& training = source.training;
  TrainOptions drawing = options;
  drawing.samples.num_samples = options.evaluation.images;
  drawing.samples.classes.clear();
  PictureSetSums sums(needs_of_samples(choice_), options.evaluation.images);
  std::vector<Image> waiting;
  std::vector<int64_t> indices;
  const auto measure = [&] {
    if (waiting.empty()) return;
    const at::Tensor pictures = as_batch(waiting);
    sums.add(indices, pictures, net_->forward(pictures));
    waiting.clear();
    indices.clear();
  };
  const bool drawn = draw_share(drawing, source, stop, [&](int64_t index, const Image& image) {
    waiting.push_back(image);
    indices.push_back(index);
    if (static_cast<int64_t>(waiting.size()) == kPicturesAtOnce) measure();
  });
  if (!drawn) return std::nullopt;
  measure();
  const PictureSet samples = sums.finish(training.state->zero->group());
  const DenoiserShape& shape = training.denoiser->shape();
  nlohmann::json sampling = {
      {"sampler", grid_sampler_config(options, source.info.objective)},
      {"cfg_scale", grid_cfg_scale(options, shape.conditioning)},
      {"label_sampling", "spread over the classes"},
      {"uint8", "truncate(clamp(127.5 x + 128, 0, 255))"},
      {"seed", options.seed},
      {"ema", options.ema.decays.empty() ? "model" : fmt::format("ema-{}", options.ema.decays.front())},
      {"compute_dtype", choice_name(options.compute.dtype)},
      {"autoencoder", source.decoder ? source.decoder->fingerprint : "none"}};
  if (!source.prompts.texts.empty()) {
    sampling["label_sampling"] = "prompts in turn";
    sampling["prompts"] = prompts_protocol(source.prompts.texts);
  }
  return stamped(metric_values(choice_, net_->name, samples, reference_),
                 protocol_of(*net_, choice_, samples, reference_, reference_crop(options), sampling));
}

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
  found.texts = spread_captions(options, asks_of(options), count);
  if (found.texts.empty())
    fail("evaluate",
         "the prompts of {} are {}, but there are none: give --prompts FILE with one prompt a line", run,
         found.origin);
  return found;
}

}  // namespace kiln
