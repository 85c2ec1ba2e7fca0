#include "checkpoint/pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "core/error.h"

namespace kiln {

using Kind = PickleValue::Kind;

namespace {

constexpr std::size_t kMaxBytes = 16u << 20;  // a whole training checkpoint of DiT-XL needs 0.3 MB
constexpr std::size_t kMaxValues = 2'000'000;
constexpr std::size_t kMaxNameLength = 200;

// Modules that reach the system or run code. Nothing is ever executed here, but a file that asks for them is
// an attack on other readers, and its user should know.
constexpr std::array kRefusedModules = {"os",
                                        "posix",
                                        "nt",
                                        "subprocess",
                                        "sys",
                                        "importlib",
                                        "runpy",
                                        "shutil",
                                        "socket",
                                        "ctypes",
                                        "pickle",
                                        "_pickle",
                                        "dill",
                                        "code",
                                        "codeop",
                                        "pty",
                                        "pdb",
                                        "bdb",
                                        "timeit",
                                        "types",
                                        "commands",
                                        "webbrowser",
                                        "asyncio",
                                        "operator",
                                        "marshal",
                                        "builtins",
                                        "__builtin__",
                                        "_operator",
                                        "signal",
                                        "cloudpickle",
                                        "threading",
                                        "multiprocessing",
                                        "_posixsubprocess",
                                        "http",
                                        "urllib"};
// Of builtins: plain types that real pickles hold.
constexpr std::array kHarmlessBuiltins = {"set",       "frozenset", "list",  "dict",  "tuple",
                                          "bytearray", "bytes",     "int",   "float", "bool",
                                          "str",       "complex",   "slice", "range", "object"};

bool is_refused(std::string_view module, std::string_view name) {
  const std::string_view package = module.substr(0, module.find('.'));
  if (std::find(kRefusedModules.begin(), kRefusedModules.end(), package) == kRefusedModules.end())
    return false;
  if (package == "builtins" || package == "__builtin__")
    return std::find(kHarmlessBuiltins.begin(), kHarmlessBuiltins.end(), name) == kHarmlessBuiltins.end();
  return true;
}

}  // namespace

const PickleValue* PickleValue::find(std::string_view key) const {
  if (kind != Kind::kDict) return nullptr;
  for (std::size_t i = items.size(); i >= 2; i -= 2)
    if (items[i - 2]->kind == Kind::kString && items[i - 2]->text == key) return items[i - 1];
  return nullptr;
}

// The stack machine that a pickle is a program for.
class PickleMachine {
 public:
  PickleMachine(std::span<const std::byte> bytes, const std::string& name, Pickle& pickle)
      : bytes_(bytes), name_(name), values_(pickle.values_) {
    if (bytes_.size() > kMaxBytes)
      fail("pickle", "{} bytes of pickle, at most {} are allowed ({})", bytes_.size(), kMaxBytes, name_);
  }

  const PickleValue* run() {
    while (true) {
      opcode_position_ = position_;
      const auto opcode = number<uint8_t>();
      if (opcode == '.') return pop();
      if (!push_scalar(opcode) && !push_container(opcode) && !change_container(opcode) && !use_name(opcode) &&
          !use_memo(opcode))
        complain(fmt::format("unknown opcode {:#04x}", opcode));
    }
  }

 private:
  [[noreturn]] void complain(const std::string& what) const {
    fail("pickle", "{} at byte {} ({}): the file is damaged or not made by torch.save", what,
         opcode_position_, name_);
  }

  // Reading the program.
  std::string_view text(uint64_t size) {
    if (size > bytes_.size() - position_) complain("the pickle ends too early");
    const std::string_view view(reinterpret_cast<const char*>(bytes_.data()) + position_, size);
    position_ += size;
    return view;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, text(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const std::string_view rest(reinterpret_cast<const char*>(bytes_.data()) + position_,
                                bytes_.size() - position_);
    const std::size_t end = rest.find('\n');
    if (end == rest.npos) complain("the pickle ends too early");
    position_ += end + 1;
    return rest.substr(0, end);
  }

  // The stack. Marks are positions in it; nothing below the last mark may be popped.
  PickleValue* make(Kind kind) {
    if (values_.size() >= kMaxValues) complain("too many values");
    values_.emplace_back().kind = kind;
    return &values_.back();
  }
  PickleValue* push(Kind kind) {
    stack_.push_back(make(kind));
    return stack_.back();
  }
  PickleValue* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) complain("the stack is empty");
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
    if (marks_.empty()) complain("a mark is missing");
    std::vector<const PickleValue*> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                                          stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  void push_text(Kind kind, uint64_t size) {
    const std::string_view view = text(size);
    push(kind)->text = kind == Kind::kString ? std::string(view) : std::string();
  }
  void push_int(int64_t value) { push(Kind::kInt)->integer = value; }
  void push_long(uint64_t size) {
    const std::string_view digits = text(size);
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
        push_int(number<int32_t>());
        return true;
      case 'K':
        push_int(number<uint8_t>());
        return true;
      case 'M':
        push_int(number<uint16_t>());
        return true;
      case 0x8a:
        push_long(number<uint8_t>());
        return true;
      case 0x8b:
        push_long(number<uint32_t>());
        return true;
      case 'G':
        push(Kind::kFloat)->real = std::bit_cast<double>(__builtin_bswap64(number<uint64_t>()));
        return true;
      case 'X':
      case 'T':
        push_text(Kind::kString, number<uint32_t>());
        return true;
      case 0x8c:
      case 'U':
        push_text(Kind::kString, number<uint8_t>());
        return true;
      case 0x8d:
        push_text(Kind::kString, number<uint64_t>());
        return true;
      case 'B':
        push_text(Kind::kOpaque, number<uint32_t>());
        return true;
      case 'C':
        push_text(Kind::kOpaque, number<uint8_t>());
        return true;
      case 0x8e:
      case 0x96:
        push_text(Kind::kOpaque, number<uint64_t>());
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
        if (opcode == 'd' && items.size() % 2 != 0) complain("a key has no value");
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
    if (kind == Kind::kDict && items.size() % 2 != 0) complain("a key has no value");
    if (target->kind == kind)
      target->items.insert(target->items.end(), items.begin(), items.end());
    else if (target->kind != Kind::kCall && target->kind != Kind::kOpaque)
      complain("items are added to something that holds none");
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
      case 'b':  // state of an object: attributes, of which a state dict needs none
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
    if (module.size() + name.size() > kMaxNameLength) complain("a class name is too long");
    if (is_refused(module, name))
      fail("pickle",
           "the file asks for {:?} ({}): weights never need it, the file is an attack and is refused",
           fmt::format("{}.{}", module, name), name_);
    push(Kind::kGlobal)->text = fmt::format("{}.{}", module, name);
  }

  void push_call(const PickleValue* callee, const PickleValue* arguments) {
    if (callee->kind != Kind::kGlobal) {
      push(Kind::kOpaque);
      return;
    }
    if (arguments->kind != Kind::kTuple) complain("a call's arguments are not a tuple");
    if (callee->text != "collections.OrderedDict") {
      push(Kind::kCall)->items = {callee, arguments};
      return;
    }
    PickleValue* dict = push(Kind::kDict);
    if (arguments->items.empty()) return;
    num_copied_ += arguments->items[0]->items.size();  // one list may be copied again and again
    if (num_copied_ > kMaxValues) complain("too many values");
    for (const PickleValue* pair :
         arguments->items[0]->items) {  // Python 2 wrote OrderedDict([[key, value], ...])
      if (pair->items.size() != 2) complain("an OrderedDict's item is not a pair");
      dict->items.insert(dict->items.end(), pair->items.begin(), pair->items.end());
    }
  }

  bool use_name(uint8_t opcode) {
    switch (opcode) {
      case 'c': {
        const std::string_view module = line();
        push_global(module, line());
        return true;
      }
      case 0x93: {
        const PickleValue* name = pop();
        const PickleValue* module = pop();
        if (name->kind != Kind::kString || module->kind != Kind::kString) complain("a class has no name");
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
    if (memo_.size() >= kMaxValues) complain("too many memo entries");
    memo_[index] = top();
  }
  void recall(uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) complain("an unknown memo entry is used");
    stack_.push_back(found->second);
  }

  bool use_memo(uint8_t opcode) {
    switch (opcode) {
      case 'q':
        remember(number<uint8_t>());
        return true;
      case 'r':
        remember(number<uint32_t>());
        return true;
      case 0x94:
        remember(static_cast<uint32_t>(memo_.size()));
        return true;
      case 'h':
        recall(number<uint8_t>());
        return true;
      case 'j':
        recall(number<uint32_t>());
        return true;
      case 0x80:
        if (const auto protocol = number<uint8_t>(); protocol < 2 || protocol > 5)
          complain(fmt::format("expected protocol 2 to 5, got {}", protocol));
        return true;
      case 0x95:  // frames only group the program for buffering
        number<uint64_t>();
        return true;
      default:
        return false;
    }
  }

  std::span<const std::byte> bytes_;
  const std::string& name_;
  std::deque<PickleValue>& values_;
  std::size_t position_ = 0, opcode_position_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<uint32_t, PickleValue*> memo_;
  std::size_t num_copied_ = 0;
};

Pickle::Pickle(std::span<const std::byte> bytes, std::string name) {
  root_ = PickleMachine(bytes, name, *this).run();
}

}  // namespace kiln
