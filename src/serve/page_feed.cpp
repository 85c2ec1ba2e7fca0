#include "serve/page_feed.h"

#include <fmt/format.h>

#include <utility>

namespace kiln {

void PageFeed::publish(const Page& page, std::map<std::string, std::string> pictures) {
  const std::lock_guard lock(mutex_);
  const nlohmann::json before = std::exchange(data_, page.json());
  const nlohmann::json &old = before.at("sections"), &sections = data_.at("sections");
  const int64_t next = version_ + 1;
  versions_.resize(sections.size());
  for (size_t i = 0; i < sections.size(); ++i) {
    // Where the page becomes shorter, its last section tells the new count.
    const bool tells_count = sections.size() < old.size() && i + 1 == sections.size();
    if (tells_count || i >= old.size() || sections[i] != old[i]) versions_[i] = version_ = next;
  }
  pictures_ = std::move(pictures);
  changed_.notify_all();
}

std::string PageFeed::html() const {
  const std::lock_guard lock(mutex_);
  return page_html(data_, version_);
}

std::string PageFeed::picture(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = pictures_.find(name);
  return found == pictures_.end() ? "" : found->second;
}

std::string PageFeed::wait_for_events(int64_t& since, std::chrono::milliseconds patience) const {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, patience, [&] { return version_ > since; })) return "";
  std::string events;
  const nlohmann::json& sections = data_.at("sections");
  for (size_t i = 0; i < sections.size(); ++i)
    if (versions_[i] > since)
      events += fmt::format("id: {}\ndata: {{\"index\":{},\"count\":{},\"section\":{}}}\n\n", version_, i,
                            sections.size(), page_json(sections[i]));
  since = version_;
  return events;
}

}  // namespace kiln
