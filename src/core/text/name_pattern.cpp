#include "core/text/name_pattern.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "core/error.h"
#include "core/text/json_text.h"

namespace kiln {
namespace {

using ByteSet = std::bitset<256>;
using Step = NamePattern::Step;

constexpr int kMostGroups = 64, kMostRepeats = 1000, kUnbounded = -1;
constexpr size_t kMostSteps = 20'000;

struct BadPattern {};  // thrown by the parser

struct Node {
  enum class Kind { kByte, kSequence, kChoice, kRepeat, kBegin, kEnd } kind = Kind::kSequence;
  ByteSet bytes{};
  std::vector<Node> parts{};
  int least = 0, most = 0;  // of kRepeat
};

template <class Holds>
ByteSet bytes_that(const Holds& holds) {
  ByteSet bytes;
  for (int byte = 0; byte < 256; ++byte) bytes[static_cast<size_t>(byte)] = holds(byte);
  return bytes;
}

class PatternParser {
 public:
  explicit PatternParser(std::string text) : all_(std::move(text)), text_(all_) {}

  Node parse() {
    Node all = choice(0);
    if (!text_.empty()) throw BadPattern();  // a bracket too many
    return all;
  }

 private:
  bool take(std::string_view text) {
    if (!text_.starts_with(text)) return false;
    text_.remove_prefix(text.size());
    return true;
  }
  char take_any() {
    if (text_.empty()) throw BadPattern();
    const char first = text_.front();
    text_.remove_prefix(1);
    return first;
  }

  Node choice(int num_groups) {
    if (num_groups > kMostGroups) throw BadPattern();
    Node node{.kind = Node::Kind::kChoice};
    do {
      Node& sequence = node.parts.emplace_back();
      while (!text_.empty() && text_.front() != '|' && text_.front() != ')')
        sequence.parts.push_back(repeated(atom(num_groups)));
    } while (take("|"));
    return node;
  }

  Node atom(int num_groups) {
    const char first = take_any();
    if (first == '(') {
      if (!take("?:") && text_.starts_with('?')) throw BadPattern();  // look-ahead, names of groups
      Node group = choice(num_groups + 1);
      if (!take(")")) throw BadPattern();
      return group;
    }
    if (first == '[') return {.kind = Node::Kind::kByte, .bytes = bracket()};
    if (first == '.')
      return {.kind = Node::Kind::kByte, .bytes = bytes_that([](int byte) { return byte != '\n'; })};
    if (first == '^') return {.kind = Node::Kind::kBegin};
    if (first == '$') return {.kind = Node::Kind::kEnd};
    if (first == '*' || first == '+' || first == '?' || first == '{') throw BadPattern();
    return {.kind = Node::Kind::kByte, .bytes = first == '\\' ? escaped() : only(first)};
  }

  static ByteSet only(char character) { return ByteSet().set(static_cast<unsigned char>(character)); }

  // Parses what follows a backslash.
  ByteSet escaped() {
    const char letter = take_any();
    const auto kind = [&](int byte) {
      const int lower = std::tolower(letter);
      return lower == 'd'   ? std::isdigit(byte) != 0
             : lower == 's' ? std::isspace(byte) != 0
                            : std::isalnum(byte) != 0 || byte == '_';
    };
    if (std::string_view("dws").find(letter) != std::string_view::npos) return bytes_that(kind);
    if (std::string_view("DWS").find(letter) != std::string_view::npos) return ~bytes_that(kind);
    if (std::isalnum(static_cast<unsigned char>(letter))) throw BadPattern();  // \1, \b
    return only(letter);
  }

  // Parses a set of characters behind its "[".
  ByteSet bracket() {
    const bool is_opposite = take("^");
    ByteSet bytes;
    do {
      const char first = take_any();
      if (first == '\\') {
        bytes |= escaped();
      } else if (text_.size() > 1 && text_[0] == '-' && text_[1] != ']') {
        take("-");
        const auto from = static_cast<unsigned char>(first), to = static_cast<unsigned char>(take_any());
        if (to < from) throw BadPattern();
        for (size_t byte = from; byte <= to; ++byte) bytes.set(byte);
      } else {
        bytes |= only(first);
      }
    } while (!take("]"));
    return is_opposite ? ~bytes : bytes;
  }

  int count() {
    int value = 0;
    while (!text_.empty() && std::isdigit(static_cast<unsigned char>(text_.front()))) {
      value = 10 * value + (take_any() - '0');
      if (value > kMostRepeats) throw BadPattern();
    }
    return value;
  }

  Node repeated(Node node) {
    int least = 0, most = kUnbounded;
    if (take("+")) {
      least = 1;
    } else if (take("?")) {
      most = 1;
    } else if (take("{")) {
      least = most = count();
      if (take(",")) most = text_.starts_with('}') ? kUnbounded : count();
      if (!take("}") || (most != kUnbounded && most < least)) throw BadPattern();
    } else if (!take("*")) {
      return node;
    }
    take("?");  // lazy: the same names match
    Node repeat{.kind = Node::Kind::kRepeat, .least = least, .most = most};
    repeat.parts.push_back(std::move(node));
    return repeat;
  }

  const std::string all_;
  std::string_view text_;  // what is left of it
};

// Appends the steps of a node, which go on behind them.
class StepWriter {
 public:
  std::vector<Step> steps;

  void add(const Node& node) {
    if (++num_calls_ > kMostSteps || steps.size() > kMostSteps) throw BadPattern();
    switch (node.kind) {
      case Node::Kind::kByte:
        push(Step::Kind::kByte).bytes = node.bytes;
        break;
      case Node::Kind::kBegin:
        push(Step::Kind::kBegin);
        break;
      case Node::Kind::kEnd:
        push(Step::Kind::kEnd);
        break;
      case Node::Kind::kSequence:
        for (const Node& part : node.parts) add(part);
        break;
      case Node::Kind::kChoice:
        add_choice(node.parts);
        break;
      case Node::Kind::kRepeat:
        add_repeat(node);
        break;
    }
  }
  Step& push(Step::Kind kind) { return steps.emplace_back(Step{.kind = kind, .next = steps.size() + 1}); }

 private:
  void add_choice(const std::vector<Node>& parts) {
    std::vector<size_t> ends;  // steps that go on behind all of it
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const size_t split = steps.size();
      push(Step::Kind::kSplit);
      add(parts[i]);
      ends.push_back(steps.size());
      push(Step::Kind::kSplit);
      steps[split].otherwise = steps.size();
    }
    add(parts.back());
    for (const size_t end : ends) steps[end].next = steps[end].otherwise = steps.size();
  }

  void add_repeat(const Node& node) {
    const Node& part = node.parts.front();
    for (int i = 0; i < node.least; ++i) add(part);
    std::vector<size_t> splits;
    const auto add_optional = [&] {
      splits.push_back(steps.size());
      push(Step::Kind::kSplit);
      add(part);
    };
    for (int i = node.least; i < node.most; ++i) add_optional();
    if (node.most == kUnbounded) {
      add_optional();
      Step& back = push(Step::Kind::kSplit);
      back.next = back.otherwise = splits.back();
    }
    for (const size_t split : splits) steps[split].otherwise = steps.size();
  }

  size_t num_calls_ = 0;
};

// The steps at which a match may be, each once.
class Places {
 public:
  explicit Places(const std::vector<Step>& steps) : steps_(&steps), is_in_(steps.size()) {}

  // Adds a step, and what follows from it without a byte.
  void add(size_t step, bool at_begin, bool at_end) {
    std::vector<size_t> waiting = {step};
    while (!waiting.empty()) {
      const size_t at = waiting.back();
      waiting.pop_back();
      if (is_in_[at]) continue;
      is_in_[at] = true;
      const Step& here = (*steps_)[at];
      using Kind = Step::Kind;
      if (here.kind == Kind::kByte || here.kind == Kind::kMatch) list_.push_back(at);
      if (here.kind == Kind::kSplit) waiting.insert(waiting.end(), {here.next, here.otherwise});
      if ((here.kind == Kind::kBegin && at_begin) || (here.kind == Kind::kEnd && at_end))
        waiting.push_back(here.next);
    }
  }
  const std::vector<size_t>& list() const { return list_; }

 private:
  const std::vector<Step>* steps_;
  std::vector<bool> is_in_;
  std::vector<size_t> list_;
};

}  // namespace

NamePattern::NamePattern(std::string_view who, std::string_view where, const std::string& pattern) try {
  StepWriter writer;
  writer.add(PatternParser("(.*\\.)?(" + pattern + ")$").parse());
  writer.push(Step::Kind::kMatch);
  steps_ = std::move(writer.steps);
} catch (const BadPattern&) {
  fail(who, "{} holds \"{}\", which is no regular expression, or uses more than groups, |, [..] and repeats",
       where, brief(pattern));
}

bool NamePattern::matches(std::string_view name) const {
  Places places(steps_);
  places.add(0, /*at_begin=*/true, name.empty());
  for (size_t i = 0; i < name.size(); ++i) {
    Places after(steps_);
    for (const size_t at : places.list())
      if (steps_[at].kind == Step::Kind::kByte && steps_[at].bytes[static_cast<unsigned char>(name[i])])
        after.add(steps_[at].next, /*at_begin=*/false, i + 1 == name.size());
    std::swap(places, after);
  }
  return std::ranges::any_of(places.list(), [&](size_t at) { return steps_[at].kind == Step::Kind::kMatch; });
}

}  // namespace kiln
