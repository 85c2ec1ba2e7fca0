#include "serve/page_feed.h"

#include <fmt/format.h>

namespace kiln {

void PageFeed::publish(const Page& page, std::map<std::string, std::string> pictures) {
  std::vector<std::string> texts;
  const nlohmann::json drawn = page.json();
  for (const nlohmann::json& section : drawn.at("sections")) texts.push_back(page_json(section));
  const std::lock_guard lock(mutex_);
  const int64_t next = version_ + 1;
  // Where the page becomes shorter, its last section tells the new count.
  const bool is_shorter = texts.size() < sections_.size();
  sections_.resize(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    if (sections_[i].json == texts[i] && !(is_shorter && i + 1 == texts.size())) continue;
    sections_[i] = {.json = std::move(texts[i]), .version = next};
    version_ = next;
  }
  data_ = page.json();
  pictures_ = std::move(pictures);
  changed_.notify_all();
}

std::string PageFeed::html() const {
  std::unique_lock lock(mutex_);
  const nlohmann::json data = data_;
  const int64_t version = version_;
  lock.unlock();
  return page_html(data, version);
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
  for (size_t i = 0; i < sections_.size(); ++i)
    if (sections_[i].version > since)
      events += fmt::format("id: {}\ndata: {{\"index\":{},\"count\":{},\"section\":{}}}\n\n", version_, i,
                            sections_.size(), sections_[i].json);
  since = version_;
  return events;
}

}  // namespace kiln
