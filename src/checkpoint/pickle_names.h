// Which Python classes and functions a weights file may name. Torch-free.
#pragma once
#include <string_view>

namespace kiln {

// True for what reaches the system or runs code, such as os.system and builtins.eval. It is never executed
// here, but a file that asks for it is an attack on other readers, and its user should know.
bool only_an_attack_needs(std::string_view module, std::string_view name);

}  // namespace kiln
