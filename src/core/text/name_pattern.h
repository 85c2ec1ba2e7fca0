// Regular expressions for names, of which the patterns may come from files. Torch-free.
#pragma once
#include <bitset>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

// A pattern of modules' names, as PEFT has it: it matches a whole name, or all of a name behind a dot.
// Matches in time that grows with the length of the pattern times that of the name (Thompson 1968, "Regular
// Expression Search Algorithm"), and without recursion over the name: std::regex can take forever and
// overflow the stack. Knows groups, |, [a-z], [^a-z], ., \w \d \s and their opposites, *, +, ?, {m,n} and
// lazy ones, ^ and $; no look-ahead and no back references. Bytes are characters.
class NamePattern {
 public:
  // Throws Error of `who`; `where` names the pattern's place.
  NamePattern(std::string_view who, std::string_view where, const std::string& pattern);

  bool matches(std::string_view name) const;

  // What a name's byte has to be, or where to go on without one.
  struct Step {
    enum class Kind { kByte, kSplit, kBegin, kEnd, kMatch } kind = Kind::kMatch;
    std::bitset<256> bytes{};        // kByte: those that fit
    size_t next = 0, otherwise = 0;  // otherwise: of kSplit
  };

 private:
  std::vector<Step> steps_;
};

}  // namespace kiln
