#include "train/run_evaluation.h"

#include <cstring>

#include "core/aten.h"
#include "core/choices.h"
#include "core/error.h"
#include "core/tensors.h"
#include "evaluate/npz_archive.h"
#include "evaluate/protocol.h"
#include "train/sample_grid.h"

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

PictureSet open_reference(const TrainOptions& options, const FeatureNet& net, const MetricChoice& choice,
                          ProcessGroup& group) {
  const std::string& path = options.evaluation.reference;
  if (path.empty()) fail("train", "--evaluate-every needs --evaluate-reference, the pictures to judge by");
  const bool is_npz = path.ends_with(".npz");
  if (is_npz && !NpzArchive(path).has("arr_0")) return read_statistics(path);
  return measure_pictures(net, *PictureSource::open(path, is_npz ? 0 : options.data.image_size),
                          needs_of_reference(choice), {}, group);
}

}  // namespace

RunEvaluation::RunEvaluation(const TrainOptions& options, ProcessGroup& group, at::Device device)
    : net_(load_feature_net(options.evaluation.net, options.evaluation.net_weights, "", device)),
      choice_(choose_metrics(feature_net_kind(options.evaluation.net), {})) {
  // A score over few pictures in splits of ten says nothing: one split.
  choice_.splits = 1;
  reference_ = open_reference(options, *net_, choice_, group);
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
  const nlohmann::json sampling = {{"sampler", grid_sampler_config(options, source.info.objective)},
                                   {"cfg_scale", grid_cfg_scale(options, shape.conditioning)},
                                   {"label_sampling", "spread over the classes"},
                                   {"uint8", "truncate(clamp(127.5 x + 128, 0, 255))"},
                                   {"seed", options.seed},
                                   {"ema", options.ema.decays.empty() ? 0.0 : options.ema.decays.front()},
                                   {"compute_dtype", choice_name(options.compute.dtype)},
                                   {"autoencoder", source.decoder ? source.decoder->fingerprint : "none"}};
  return stamped(
      metric_values(choice_, net_->name, samples, reference_),
      {{"feature_net", {{"name", net_->name}, {"weights", net_->fingerprint}, {"resize", net_->resize}}},
       {"reference", {{"fingerprint", reference_.fingerprint}, {"num_pictures", reference_.count}}},
       {"num_samples", samples.count},
       {"samples", sampling}});
}

}  // namespace kiln
