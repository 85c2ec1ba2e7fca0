#include "watch/thinned_lines.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kiln {

namespace {

using Json = nlohmann::json;

constexpr const char* kWithExtremes[] = {"loss", "grad_norm"};

// Makes `mean` that of `count` lines and `more` of them. What is no number is taken from the newer line, and
// a number that only one has from that one. Peaks stay peaks.
void merge_means(Json& mean, int64_t count, const Json& more, int64_t num_more, bool is_peak = false) {
  if (mean.is_number() && more.is_number()) {
    const double one = mean.get<double>(), other = more.get<double>();
    mean = is_peak
               ? std::max(one, other)
               : one + (other - one) * static_cast<double>(num_more) / static_cast<double>(count + num_more);
  } else if (mean.is_object() && more.is_object()) {
    for (const auto& [key, value] : more.items())
      if (Json& of_mean = mean[key]; key != kLowest && key != kHighest)
        merge_means(of_mean, count, value, num_more, key.starts_with("peak_") && key.ends_with("_bytes"));
  } else if (mean.is_array() && more.is_array() && mean.size() == more.size()) {
    for (size_t i = 0; i < mean.size(); ++i) merge_means(mean[i], count, more[i], num_more);
  } else if (!more.is_null()) {
    mean = more;
  }
}

// The extreme of a number in a line that may stand for several.
Json extreme_of(const Json& line, const char* extreme, const char* key) {
  const Json& numbers = line.contains(extreme) ? line.at(extreme) : line;
  return numbers.is_object() ? numbers.value(key, Json()) : Json();
}

void merge_lines(Json& line, int64_t count, const Json& more, int64_t num_more) {
  Json lowest = Json::object(), highest = Json::object();
  for (const char* key : kWithExtremes)
    for (const Json* one : {&std::as_const(line), &more}) {
      const Json low = extreme_of(*one, kLowest, key), high = extreme_of(*one, kHighest, key);
      if (!low.is_number() || !high.is_number()) continue;
      lowest[key] =
          lowest.contains(key) ? std::min(lowest[key].get<double>(), low.get<double>()) : low.get<double>();
      highest[key] = highest.contains(key) ? std::max(highest[key].get<double>(), high.get<double>())
                                           : high.get<double>();
    }
  merge_means(line, count, more, num_more);
  line[kLowest] = std::move(lowest);
  line[kHighest] = std::move(highest);
}

}  // namespace

void ThinnedLines::add(Json line) {
  if (!line.is_object()) return;
  for (const char* ours : {kLowest, kHighest}) line.erase(ours);
  if (!lines_.empty() && in_last_ < stride_) {
    merge_lines(lines_.back(), in_last_++, line, 1);
    return;
  }
  if (lines_.size() == most_) {  // all are full
    for (size_t i = 0; i < most_ / 2; ++i) {
      if (i > 0) lines_[i] = std::move(lines_[2 * i]);
      merge_lines(lines_[i], stride_, lines_[2 * i + 1], stride_);
    }
    lines_.resize(most_ / 2);
    stride_ *= 2;
  }
  lines_.push_back(std::move(line));
  in_last_ = 1;
}

}  // namespace kiln
