// Python pickles as plain trees, without executing anything. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

struct PickleValue {
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kTuple,
    kList,
    kDict,        // dict and OrderedDict
    kGlobal,      // a class or function, by name: text = "module.name"
    kCall,        // what calling items[0] (a global) with items[1] (its arguments) would have made
    kPersistent,  // a reference to data outside of the pickle: items[0] = its description
    kOpaque,      // anything else (bytes, sets, big numbers, objects)
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;  // kBool, kInt
  double real = 0;      // kFloat
  std::string text;     // kString, kGlobal
  // Tuple and list: the items. Dict: key, value, key, value... Values may be shared and may form cycles.
  std::vector<const PickleValue*> items;

  bool is_call_of(std::string_view function) const {
    return kind == Kind::kCall && items[0]->text == function;
  }
  // Returns a dict's value under a string key, the last one if there are several; nullptr if there is none or
  // this is no dict.
  const PickleValue* find(std::string_view key) const;
};

// A parsed pickle; owns its values.
class Pickle {
 public:
  // Reads the opcodes of protocols 2 to 5 that plain data and torch tensors use. Unknown classes are kept as
  // calls that are never made; names that only an attack needs (os.system, builtins.eval, ...) are refused.
  // Throws Error.
  Pickle(std::span<const std::byte> bytes, const std::string& name);
  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleMachine;
  std::deque<PickleValue> values_;
  const PickleValue* root_ = nullptr;
};

// Throws Error if a pickle of so many bytes is not read: to ask before it is unpacked.
void check_pickle_size(uint64_t num_bytes, const std::string& name);
// True for what reaches the system or runs code, such as os.system and builtins.eval. It is never executed
// here, but a file that asks for it is an attack on other readers, and its user should know.
bool only_an_attack_needs(std::string_view module, std::string_view name);

}  // namespace kiln
