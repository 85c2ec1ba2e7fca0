#include "core/text/name_pattern.h"

#include <regex>

#include "test_files.h"

namespace kiln {
namespace {

// The words of a text, and the empty one.
std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> all = {""};
  for (std::string word; stream >> word;) all.push_back(word);
  return all;
}

// Those of std::regex, which PEFT's patterns were matched with before.
TEST(NamePattern, MatchesAsARegularExpressionDoes) {
  const std::vector<std::string> patterns =
      words(R"(to_q to_[qv] \w*attn\w*\..* .*mid_block.*\.conv2 attn2.to_q (attn1|attn2) blocks\.[0-3]\..*
               a{2,3}b? (ab|a)(c|bcd)* [^.]+ x{0,2} ^a.b$ (?:a|b)+?c \d+ [a-cx-]+ to_q|to_v (a|)b a{2})");
  const std::vector<std::string> names =
      words(R"(to_q attn1.to_q x.attn2.to_q up_blocks.0.attn1.to_v mid_block.1.conv2 blocks.2.x blocks.4.x
               aab aaa aaaab abcd abbcd abc a.b aXb abac 12 q.12 xx b a-x to_qq aa .)");
  for (const std::string& pattern : patterns) {
    const NamePattern own("test", "key", pattern);
    const std::regex other("(.*\\.)?(" + pattern + ")$");
    for (const std::string& name : names)
      EXPECT_EQ(own.matches(name), std::regex_match(name, other)) << pattern << " and " << name;
  }
}

TEST(NamePattern, Finding9NoPatternTakesForEverOrOverflows) {
  const std::string name(20'000, 'a');
  EXPECT_FALSE(NamePattern("test", "key", "(a*)*b").matches(name));
  EXPECT_TRUE(NamePattern("test", "key", "(a|a)*").matches(name));
  for (const std::string& pattern :
       {std::string(100'000, '('), std::string(100'000, '['), std::string("(((a{1000}){1000}){1000})"),
        std::string("((((){1000}){1000}){1000}){1000}"), std::string("(a"), std::string("a)"),
        std::string("*"), std::string("a{3,2}"), std::string("a{99999}"), std::string("(?!a)b"),
        std::string("(a)\\1"), std::string("[b-a]"), std::string("\\")})
    EXPECT_ERROR(NamePattern("test", "rank_pattern", pattern),
                 "rank_pattern holds \"" + pattern.substr(0, 5));
}

}  // namespace
}  // namespace kiln
