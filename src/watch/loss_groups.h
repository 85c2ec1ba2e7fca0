// Sums losses by name, such as the source of a sample.
#pragma once
#include <map>
#include <string>

#include "core/json.h"

namespace kiln {

class LossGroups {
 public:
  LossGroups() = default;
  // Continues from what sums() returned.
  explicit LossGroups(const nlohmann::json& sums) {
    for (const auto& [name, group] : sums.items())
      groups_[name] = {.loss = group.at(0), .count = group.at(1)};
  }

  void add(const std::string& name, double loss) {
    Group& group = groups_[name];
    group.loss += loss;
    group.count += 1;
  }
  bool empty() const { return groups_.empty(); }
  nlohmann::json means() const {
    nlohmann::json means = nlohmann::json::object();
    for (const auto& [name, group] : groups_) means[name] = group.loss / group.count;
    return means;
  }
  nlohmann::json sums() const {
    nlohmann::json sums = nlohmann::json::object();
    for (const auto& [name, group] : groups_) sums[name] = {group.loss, group.count};
    return sums;
  }

 private:
  struct Group {
    double loss = 0, count = 0;  // sums
  };
  std::map<std::string, Group> groups_;
};

}  // namespace kiln
