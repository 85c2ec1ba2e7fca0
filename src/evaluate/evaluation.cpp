#include "evaluate/evaluation.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "evaluate/metrics.h"
#include "evaluate/npz_archive.h"

namespace kiln {
namespace {

constexpr const char* kNames[] = {"fid", "sfid", "inception_score", "precision_recall", "kid"};

bool is_given_by(const FeatureNetKind& net, const std::string& metric) {
  if (metric == "sfid") return net.has_spatial;
  if (metric == "inception_score") return net.has_logits;
  return true;
}

}  // namespace

bool MetricChoice::has(const std::string& name) const {
  return std::find(names.begin(), names.end(), name) != names.end();
}

MetricChoice choose_metrics(const FeatureNetKind& net, const std::vector<std::string>& names) {
  MetricChoice choice{.names = names};
  for (const std::string& name : names) {
    if (std::find(std::begin(kNames), std::end(kNames), name) == std::end(kNames))
      fail("evaluate", "unknown metric \"{}\"; known are {}", name, fmt::join(kNames, ", "));
    if (!is_given_by(net, name)) fail("evaluate", "the net {} gives no {}", net.name, name);
  }
  if (names.empty())
    for (const char* name : kNames)
      if (is_given_by(net, name)) choice.names.emplace_back(name);
  return choice;
}

PictureSetNeeds needs_of_reference(const MetricChoice& choice) {
  return {.gaussian = choice.has("fid"),
          .spatial = choice.has("sfid"),
          .features = choice.has("precision_recall") || choice.has("kid")};
}

PictureSetNeeds needs_of_samples(const MetricChoice& choice) {
  PictureSetNeeds needs = needs_of_reference(choice);
  needs.score_splits = choice.has("inception_score") ? choice.splits : 0;
  return needs;
}

PictureSet measure_reference(const std::string& path, int64_t crop, const FeatureNet& net,
                             const MetricChoice& choice, const ExtractionOptions& options,
                             ProcessGroup& group) {
  PictureSetNeeds missing = needs_of_reference(choice);
  PictureSet given;
  if (path.ends_with(".npz")) {
    const NpzArchive archive(path);
    const bool has_pictures = archive.has("arr_0");
    if (!has_pictures || (archive.has("mu") && feature_net_kind(net.name).statistics_are_published))
      given = read_statistics(path);
    if (!has_pictures) return given;
  }
  if (given.gaussian) missing.gaussian = false;
  if (given.spatial) missing.spatial = false;
  if (!missing.gaussian && !missing.spatial && !missing.features) return given;
  const auto pictures = PictureSource::open(path, crop, /*skips_broken=*/true);
  PictureSet set = measure_pictures(net, *pictures, missing, options, group);
  if (group.rank() == 0 && options.num_pictures == 0 && set.count < pictures->size())
    fmt::print(stderr, "note: {} of the {} pictures in {} are broken or missing and were skipped\n",
               pictures->size() - set.count, pictures->size(), path);
  if (given.gaussian) set.gaussian = given.gaussian;
  if (given.spatial) set.spatial = given.spatial;
  if (!given.fingerprint.empty()) set.fingerprint += " " + given.fingerprint;
  return set;
}

nlohmann::json metric_values(const MetricChoice& choice, const std::string& net, const PictureSet& samples,
                             const PictureSet& reference) {
  const bool is_inception = net == "inception";
  nlohmann::json values = nlohmann::json::object();
  if (choice.has("fid") && reference.gaussian)
    values[is_inception ? "fid" : "fd_" + net] = frechet_distance(*samples.gaussian, *reference.gaussian);
  if (choice.has("sfid") && reference.spatial)
    values["sfid"] = frechet_distance(*samples.spatial, *reference.spatial);
  if (samples.score) {
    values["inception_score"] = samples.score->mean;
    values["inception_score_deviation"] = samples.score->deviation;
  }
  if (!reference.features.defined()) return values;
  if (choice.has("precision_recall")) {
    const PrecisionRecall result = precision_recall(reference.features, samples.features, choice.k);
    values["precision"] = result.precision;
    values["recall"] = result.recall;
  }
  if (choice.has("kid"))
    values[is_inception ? "kid" : "kd_" + net] = kernel_distance(reference.features, samples.features);
  return values;
}

nlohmann::json protocol_of(const FeatureNet& net, const MetricChoice& choice, const PictureSet& samples,
                           const PictureSet& reference, int64_t crop, const nlohmann::json& sampling) {
  nlohmann::json protocol = {
      {"feature_net", {{"name", net.name}, {"weights", net.fingerprint}, {"resize", net.resize}}},
      {"reference", {{"fingerprint", reference.fingerprint}, {"crop", crop}}},
      {"num_samples", samples.count},
      {"samples", sampling}};
  if (reference.count > 0) protocol["reference"]["num_pictures"] = reference.count;
  if (choice.has("inception_score")) protocol["splits"] = choice.splits;
  if (choice.has("precision_recall")) protocol["k"] = choice.k;
  return protocol;
}

}  // namespace kiln
