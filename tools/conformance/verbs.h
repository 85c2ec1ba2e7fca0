// The verbs of kiln-conformance: each runs one component on tensors from files. docs/conformance.md is the interface.
#pragma once
#include <CLI/CLI.hpp>

namespace kiln::conformance {

using AddVerb = void (*)(CLI::App&);
inline constexpr std::initializer_list<AddVerb> kVerbs = {};

}  // namespace kiln::conformance
