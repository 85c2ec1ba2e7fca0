#include <algorithm>

#include "core/error.h"
#include "data/images/dataset_layouts.h"

namespace kiln::layouts {
namespace {

constexpr int64_t kMaxClasses = 1 << 20;

}  // namespace

void LabelCollector::add(const nlohmann::json& label, const std::string& where) {
  if (label.is_string()) {
    labels_.push_back({-1, label.get<std::string>(), true});
    return;
  }
  if (!label.is_number_integer())
    fail("dataset", "expected a class as an integer or a name, got {} ({})", label.dump(), where);
  const auto index = label.get<int64_t>();
  if (index < 0 || index >= kMaxClasses)
    fail("dataset", "expected a class from 0 to {}, got {} ({})", kMaxClasses - 1, label.dump(), where);
  labels_.push_back({index, {}, true});
}

std::vector<std::string> LabelCollector::finish(std::vector<ImageRecord>& records,
                                                const std::string& where) const {
  std::vector<std::string> names;
  int64_t num_set = 0, num_integers = 0, num_classes = 0;
  for (const Label& label : labels_) {
    num_set += label.is_set;
    if (label.is_set && label.index >= 0) ++num_integers;
    num_classes = std::max(num_classes, label.index + 1);
    if (label.is_set && label.index < 0) names.push_back(label.name);
  }
  if (num_set == 0) return {};
  if (num_set != static_cast<int64_t>(labels_.size())) {
    const auto missing =
        std::find_if(labels_.begin(), labels_.end(), [](const Label& label) { return !label.is_set; });
    fail("dataset", "expected a class for every picture or for none, got {} of {}: {} has none ({})", num_set,
         labels_.size(), records[missing - labels_.begin()].name, where);
  }
  if (num_integers != 0 && !names.empty())
    fail("dataset", "expected classes as integers or as names, got both ({})", where);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  for (size_t i = 0; i < labels_.size(); ++i) {
    const auto& label = labels_[i];
    records[i].label = label.index >= 0
                           ? label.index
                           : std::lower_bound(names.begin(), names.end(), label.name) - names.begin();
  }
  for (int64_t i = 0; i < num_classes; ++i) names.push_back(std::to_string(i));
  return names;
}

}  // namespace kiln::layouts
