#include "checkpoint/pickle.h"

#include <algorithm>
#include <array>

namespace kiln {

namespace {

// Modules that reach the system or run code.
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
// These builtins are plain types that real pickles hold.
constexpr std::array kHarmlessBuiltins = {"set",       "frozenset", "list",  "dict",  "tuple",
                                          "bytearray", "bytes",     "int",   "float", "bool",
                                          "str",       "complex",   "slice", "range", "object"};

}  // namespace

bool only_an_attack_needs(std::string_view module, std::string_view name) {
  const std::string_view package = module.substr(0, module.find('.'));
  if (std::find(kRefusedModules.begin(), kRefusedModules.end(), package) == kRefusedModules.end())
    return false;
  if (package == "builtins" || package == "__builtin__")
    return std::find(kHarmlessBuiltins.begin(), kHarmlessBuiltins.end(), name) == kHarmlessBuiltins.end();
  return true;
}

}  // namespace kiln
