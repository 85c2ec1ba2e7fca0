// Pages that change while browsers show them.
#include "serve/page_feed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "page_data.h"

namespace kiln {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr std::chrono::milliseconds kAtOnce(0);

Page page_of(const std::vector<std::string>& sections) {
  Page page("a run");
  for (const std::string& text : sections) {
    page.section("");
    page.text(text);
  }
  return page;
}

TEST(PageFeed, SendsTheSectionsThatHaveChanged) {
  PageFeed feed;
  feed.publish(page_of({"one", "two", "three"}));
  int64_t since = 0;
  EXPECT_THAT(feed.wait_for_events(since, kAtOnce), HasSubstr("\"index\":2,\"count\":3"));
  EXPECT_EQ(feed.wait_for_events(since, kAtOnce), "");
  feed.publish(page_of({"one", "2", "three", "four"}));
  const std::string events = feed.wait_for_events(since, kAtOnce);
  EXPECT_THAT(events, HasSubstr("id: 2\ndata: {\"index\":1,\"count\":4,"));
  EXPECT_THAT(events, HasSubstr("\"index\":3"));
  EXPECT_THAT(events, Not(HasSubstr("three")));
}

TEST(PageFeed, TellsThatAPageHasBecomeShorter) {
  PageFeed feed;
  feed.publish(page_of({"one", "two", "three"}));
  int64_t since = 1;
  feed.publish(page_of({"one"}));
  EXPECT_THAT(feed.wait_for_events(since, kAtOnce), HasSubstr("\"index\":0,\"count\":1"));
}

TEST(PageFeed, AnEventIsOneLineWhateverATextHolds) {
  PageFeed feed;
  feed.publish(page_of({"a\n\ndata: b\r\n\xE2\x80\xA8</script>"}));
  int64_t since = 0;
  const std::string events = feed.wait_for_events(since, kAtOnce);
  EXPECT_EQ(std::count(events.begin(), events.end(), '\n'), 3);
  EXPECT_THAT(events, Not(HasSubstr("<")));
}

TEST(PageFeed, WakesWhoeverWaits) {
  PageFeed feed;
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    feed.publish(page_of({"one"}));
  });
  int64_t since = 0;
  EXPECT_NE(feed.wait_for_events(since, std::chrono::minutes(1)), "");
  writer.join();
}

TEST(PageFeed, OnlyAServedPageMayConnect) {
  PageFeed feed;
  feed.publish(page_of({"one"}), {{"a.png", "/runs/a.png"}});
  EXPECT_THAT(feed.html(), HasSubstr("default-src 'none'; connect-src 'self'; img-src"));
  EXPECT_EQ(nlohmann::json::parse(test::data_text(feed.html())).at("since"), 1);
  EXPECT_THAT(page_of({"one"}).html(), Not(HasSubstr("connect-src")));
  EXPECT_EQ(feed.picture("a.png"), "/runs/a.png");
  EXPECT_EQ(feed.picture("../a.png"), "");
}

}  // namespace
}  // namespace kiln
