#include "evaluate/reference.h"

#include "evaluate/npz_archive.h"

namespace kiln {

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
  PictureSet set = measure_pictures(net, *PictureSource::open(path, crop), missing, options, group);
  if (given.gaussian) set.gaussian = given.gaussian;
  if (given.spatial) set.spatial = given.spatial;
  if (!given.fingerprint.empty()) set.fingerprint += " " + given.fingerprint;
  return set;
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
