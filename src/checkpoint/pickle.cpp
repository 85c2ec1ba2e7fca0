#include "checkpoint/pickle.h"

#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "checkpoint/pickle_reader.h"
#include "core/error.h"

namespace kiln {

using Kind = PickleValue::Kind;

namespace {

constexpr std::size_t kMaxBytes = 16u << 20;  // a whole training checkpoint of DiT-XL needs 0.3 MB
constexpr std::size_t kMaxValues = 2'000'000;
constexpr std::size_t kMaxNameLength = 200;

}  // namespace

void check_pickle_size(uint64_t num_bytes, const std::string& name) {
  if (num_bytes > kMaxBytes)
    fail("pickle", "the pickle has {} bytes, at most {} are allowed ({})", num_bytes, kMaxBytes, name);
}

const PickleValue* PickleValue::find(std::string_view key) const {
  if (kind != Kind::kDict) return nullptr;
  for (std::size_t i = items.size(); i >= 2; i -= 2)
    if (items[i - 2]->kind == Kind::kString && items[i - 2]->text == key) return items[i - 1];
  return nullptr;
}

// The stack machine that runs a pickle.
class PickleMachine {
 public:
  PickleMachine(std::span<const std::byte> bytes, const std::string& name, Pickle& pickle)
      : in_(bytes, name), values_(pickle.values_) {
    check_pickle_size(bytes.size(), name);
  }

  const PickleValue* run() {
    while (true) {
      const uint8_t opcode = in_.next_opcode();
      if (opcode == '.') return pop();
      if (!push_scalar(opcode) && !push_container(opcode) && !change_container(opcode) && !use_name(opcode) &&
          !use_memo(opcode))
        in_.complain(fmt::format("unknown opcode {:#04x}", opcode));
    }
  }

 private:
  // The stack. Marks are positions in it; nothing below the last mark may be popped.
  PickleValue* make(Kind kind) {
    if (values_.size() >= kMaxValues) in_.complain("too many values");
    values_.emplace_back().kind = kind;
    return &values_.back();
  }
  PickleValue* push(Kind kind) {
    stack_.push_back(make(kind));
    return stack_.back();
  }
  PickleValue* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) in_.complain("the stack is empty");
    PickleValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue* top() {
    PickleValue* value = pop();
    stack_.push_back(value);
    return value;
  }
  std::vector<const PickleValue*> pop_to_mark() {
    if (marks_.empty()) in_.complain("a mark is missing");
    std::vector<const PickleValue*> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                                          stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  void push_text(Kind kind, uint64_t size) {
    const std::string_view view = in_.text(size);
    push(kind)->text = kind == Kind::kString ? std::string(view) : std::string();
  }
  void push_int(int64_t value) { push(Kind::kInt)->integer = value; }
  void push_long(uint64_t size) {
    const std::string_view digits = in_.text(size);
    if (size > 8) {
      push(Kind::kOpaque);
      return;
    }
    int64_t value = size > 0 && (digits.back() & 0x80) ? -1 : 0;  // little-endian two's complement
    std::memcpy(&value, digits.data(), size);
    push_int(value);
  }

  bool push_scalar(uint8_t opcode) {
    switch (opcode) {
      case 'N':
        push(Kind::kNone);
        return true;
      case 0x88:
      case 0x89:
        push(Kind::kBool)->integer = opcode == 0x88;
        return true;
      case 'J':
        push_int(in_.number<int32_t>());
        return true;
      case 'K':
        push_int(in_.number<uint8_t>());
        return true;
      case 'M':
        push_int(in_.number<uint16_t>());
        return true;
      case 0x8a:
        push_long(in_.number<uint8_t>());
        return true;
      case 0x8b:
        push_long(in_.number<uint32_t>());
        return true;
      case 'G':
        push(Kind::kFloat)->real = std::bit_cast<double>(__builtin_bswap64(in_.number<uint64_t>()));
        return true;
      case 'X':
      case 'T':
        push_text(Kind::kString, in_.number<uint32_t>());
        return true;
      case 0x8c:
      case 'U':
        push_text(Kind::kString, in_.number<uint8_t>());
        return true;
      case 0x8d:
        push_text(Kind::kString, in_.number<uint64_t>());
        return true;
      case 'B':
        push_text(Kind::kOpaque, in_.number<uint32_t>());
        return true;
      case 'C':
        push_text(Kind::kOpaque, in_.number<uint8_t>());
        return true;
      case 0x8e:
      case 0x96:
        push_text(Kind::kOpaque, in_.number<uint64_t>());
        return true;
      default:
        return false;
    }
  }

  bool push_container(uint8_t opcode) {
    switch (opcode) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case ')':
        push(Kind::kTuple);
        return true;
      case ']':
        push(Kind::kList);
        return true;
      case '}':
        push(Kind::kDict);
        return true;
      case 0x8f:
        push(Kind::kOpaque);
        return true;
      case 0x85:
      case 0x86:
      case 0x87: {
        std::vector<const PickleValue*> items(opcode - 0x84u);
        for (std::size_t i = items.size(); i-- > 0;) items[i] = pop();
        push(Kind::kTuple)->items = std::move(items);
        return true;
      }
      case 't':
      case 'l':
      case 'd':
      case 0x91: {
        auto items = pop_to_mark();
        if (opcode == 'd' && items.size() % 2 != 0) in_.complain("a key has no value");
        const Kind kind = opcode == 't' ? Kind::kTuple : opcode == 'l' ? Kind::kList : Kind::kDict;
        push(opcode == 0x91 ? Kind::kOpaque : kind)->items = std::move(items);
        return true;
      }
      default:
        return false;
    }
  }

  // Only lists and dicts keep what is added: other objects (defaultdict, deque, sets) stay opaque.
  void add(PickleValue* target, Kind kind, const std::vector<const PickleValue*>& items) {
    if (kind == Kind::kDict && items.size() % 2 != 0) in_.complain("a key has no value");
    if (target->kind == kind)
      target->items.insert(target->items.end(), items.begin(), items.end());
    else if (target->kind != Kind::kCall && target->kind != Kind::kOpaque)
      in_.complain("items are added to something that holds none");
  }

  bool change_container(uint8_t opcode) {
    switch (opcode) {
      case 'a': {
        const PickleValue* item = pop();
        add(top(), Kind::kList, {item});
        return true;
      }
      case 's': {
        const PickleValue* value = pop();
        const PickleValue* key = pop();
        add(top(), Kind::kDict, {key, value});
        return true;
      }
      case 'e':
      case 'u':
      case 0x90: {
        const auto items = pop_to_mark();
        add(top(), opcode == 'e' ? Kind::kList : opcode == 'u' ? Kind::kDict : Kind::kOpaque, items);
        return true;
      }
      case 'b':  // state of an object: its attributes, which a state dict does not need
        pop();
        top();
        return true;
      case '0':
        pop();
        return true;
      case '1':
        pop_to_mark();
        return true;
      case '2':
        stack_.push_back(top());
        return true;
      default:
        return false;
    }
  }

  void push_global(std::string_view module, std::string_view name) {
    if (module.size() + name.size() > kMaxNameLength) in_.complain("a class name is too long");
    if (only_an_attack_needs(module, name))
      fail("pickle",
           "the file asks for {:?} ({}): weights never need it, the file is an attack and is refused",
           fmt::format("{}.{}", module, name), in_.name());
    push(Kind::kGlobal)->text = fmt::format("{}.{}", module, name);
  }

  void push_call(const PickleValue* callee, const PickleValue* arguments) {
    if (callee->kind != Kind::kGlobal) {
      push(Kind::kOpaque);
      return;
    }
    if (arguments->kind != Kind::kTuple) in_.complain("a call's arguments are not a tuple");
    if (callee->text != "collections.OrderedDict") {
      push(Kind::kCall)->items = {callee, arguments};
      return;
    }
    PickleValue* dict = push(Kind::kDict);
    if (arguments->items.empty()) return;
    num_copied_ += arguments->items[0]->items.size();  // one list may be copied again and again
    if (num_copied_ > kMaxValues) in_.complain("too many values");
    for (const PickleValue* pair :
         arguments->items[0]->items) {  // Python 2 wrote OrderedDict([[key, value], ...])
      if (pair->items.size() != 2) in_.complain("an OrderedDict's item is not a pair");
      dict->items.insert(dict->items.end(), pair->items.begin(), pair->items.end());
    }
  }

  bool use_name(uint8_t opcode) {
    switch (opcode) {
      case 'c': {
        const std::string_view module = in_.line();
        push_global(module, in_.line());
        return true;
      }
      case 0x93: {
        const PickleValue* name = pop();
        const PickleValue* module = pop();
        if (name->kind != Kind::kString || module->kind != Kind::kString) in_.complain("a class has no name");
        push_global(module->text, name->text);
        return true;
      }
      case 0x92:  // keyword arguments do not matter to a call that is not made
        pop();
        [[fallthrough]];
      case 'R':
      case 0x81: {
        const PickleValue* arguments = pop();
        const PickleValue* callee = pop();
        push_call(callee, arguments);
        return true;
      }
      case 'Q': {
        const PickleValue* description = pop();
        push(Kind::kPersistent)->items = {description};
        return true;
      }
      default:
        return false;
    }
  }

  void remember(uint32_t index) {
    if (memo_.size() >= kMaxValues) in_.complain("too many memo entries");
    memo_[index] = top();
  }
  void recall(uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) in_.complain("an unknown memo entry is used");
    stack_.push_back(found->second);
  }

  bool use_memo(uint8_t opcode) {
    switch (opcode) {
      case 'q':
        remember(in_.number<uint8_t>());
        return true;
      case 'r':
        remember(in_.number<uint32_t>());
        return true;
      case 0x94:
        remember(static_cast<uint32_t>(memo_.size()));
        return true;
      case 'h':
        recall(in_.number<uint8_t>());
        return true;
      case 'j':
        recall(in_.number<uint32_t>());
        return true;
      case 0x80:
        if (const auto protocol = in_.number<uint8_t>(); protocol < 2 || protocol > 5)
          in_.complain(fmt::format("expected protocol 2 to 5, got {}", protocol));
        return true;
      case 0x95:  // frames only group the program for buffering
        in_.number<uint64_t>();
        return true;
      default:
        return false;
    }
  }

  PickleReader in_;
  std::deque<PickleValue>& values_;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<uint32_t, PickleValue*> memo_;
  std::size_t num_copied_ = 0;
};

Pickle::Pickle(std::span<const std::byte> bytes, const std::string& name) {
  root_ = PickleMachine(bytes, name, *this).run();
}

}  // namespace kiln
