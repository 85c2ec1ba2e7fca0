#include "data/store/data_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kiln {
namespace {

bool is_smaller(const Lane& a, const Lane& b) { return a.area() < b.area(); }

}  // namespace

std::string lanes_text(const std::vector<Lane>& lanes) {
  const auto text = [](const Lane& lane) { return fmt::format("{} x {}", lane.height, lane.width); };
  if (lanes.size() == 1) return text(lanes[0]);
  const auto [smallest, largest] = std::minmax_element(lanes.begin(), lanes.end(), is_smaller);
  return fmt::format("{} shapes from {} to {}", lanes.size(), text(*smallest), text(*largest));
}

const Lane& DataShape::largest() const { return *std::max_element(lanes.begin(), lanes.end(), is_smaller); }

int64_t DataShape::side() const {
  if (lanes.size() == 1) return std::max(lanes[0].height, lanes[0].width);
  const auto oblongness = [](const Lane& lane) {
    return std::abs(std::log(static_cast<double>(lane.height) / static_cast<double>(lane.width)));
  };
  const Lane& squarest = *std::ranges::min_element(lanes, {}, oblongness);
  // Rounds to an even side, which patches of two by two cover.
  return 2 * std::llround(std::sqrt(static_cast<double>(squarest.area())) / 2);
}

}  // namespace kiln
