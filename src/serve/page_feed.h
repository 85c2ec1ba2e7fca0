// A page that changes while browsers show it: they get the sections that are newer than what they have.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/json.h"
#include "core/page/page.h"

namespace kiln {

// Thread-safe.
class PageFeed {
 public:
  // Replaces the page, and the files of its pictures by their names.
  void publish(const Page& page, std::map<std::string, std::string> pictures = {});

  // Returns the page, which asks for what comes after it (page_html).
  std::string html() const;
  // Returns the file of a picture of the page, or "".
  std::string picture(const std::string& name) const;
  // Returns the sections that are newer than `since`, as server-sent events with JSON of index, count and
  // section, and sets `since` to what is newest. Waits for them, and returns "" if none came in this time.
  std::string wait_for_events(int64_t& since, std::chrono::milliseconds patience) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  nlohmann::json data_ = Page("Kiln").json();
  int64_t version_ = 0;
  std::vector<int64_t> versions_;  // of the sections: those of the page when they came
  std::map<std::string, std::string> pictures_;
};

}  // namespace kiln
