#pragma once
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace kiln::cli {

// Refuses a sign in front of an unsigned number: CLI11 reads -1 as 2^64 - 1.
inline CLI::Validator not_negative() {
  return {[](std::string& text) {
            return text.starts_with('-') ? fmt::format("expects a whole number from 0 on, got {}", text) : "";
          },
          ""};
}

}  // namespace kiln::cli
