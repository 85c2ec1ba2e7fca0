#include "checkpoint/pickle.h"

#include <algorithm>

#include "core/text/split.h"

namespace kiln {

namespace {

// Modules that reach the system or run code.
constexpr const char* kRefusedModules =
    "os posix nt subprocess sys importlib runpy shutil socket ctypes pickle _pickle dill code codeop pty "
    "pdb bdb timeit types commands webbrowser asyncio operator marshal builtins __builtin__ _operator "
    "signal cloudpickle threading multiprocessing _posixsubprocess http urllib";
// These builtins are plain types that real pickles hold.
constexpr const char* kHarmlessBuiltins =
    "set frozenset list dict tuple bytearray bytes int float bool str complex slice range object";

}  // namespace

bool only_an_attack_needs(std::string_view module, std::string_view name) {
  const std::string_view package = module.substr(0, module.find('.'));
  static const std::vector<std::string> refused = words_in(kRefusedModules),
                                        harmless = words_in(kHarmlessBuiltins);
  if (std::ranges::find(refused, package) == refused.end()) return false;
  if (package == "builtins" || package == "__builtin__")
    return std::ranges::find(harmless, name) == harmless.end();
  return true;
}

}  // namespace kiln
