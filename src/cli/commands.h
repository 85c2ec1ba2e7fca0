// The program and all its subcommands. Each function adds one to the app, with a callback that runs it.
#pragma once
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace kiln::cli {

using AddCommand = void (*)(CLI::App&);
void add_check_data_command(CLI::App& app);
void add_completion_command(CLI::App& app);
void add_convert_command(CLI::App& app);
void add_doctor_command(CLI::App& app);
void add_download_command(CLI::App& app);
void add_evaluate_command(CLI::App& app);
void add_extract_command(CLI::App& app);
void add_inspect_command(CLI::App& app);
void add_man_command(CLI::App& app);
void add_models_command(CLI::App& app);
void add_plan_command(CLI::App& app);
void add_probe_command(CLI::App& app);
void add_report_command(CLI::App& app);
void add_sample_command(CLI::App& app);
void add_serve_command(CLI::App& app);
void add_store_command(CLI::App& app);
void add_train_command(CLI::App& app);

inline constexpr AddCommand kCommands[] = {
    add_train_command,      add_plan_command,     add_probe_command,      add_convert_command,
    add_extract_command,    add_inspect_command,  add_sample_command,     add_store_command,
    add_evaluate_command,   add_download_command, add_report_command,     add_models_command,
    add_completion_command, add_man_command,      add_check_data_command, add_doctor_command,
    add_serve_command,
};

// Makes an empty app the program: its name, its version and all its commands.
void make_program(CLI::App& app);

// Refuses a sign in front of an unsigned number: CLI11 reads -1 as 2^64 - 1.
inline CLI::Validator not_negative() {
  return {[](std::string& text) {
            return text.starts_with('-') ? fmt::format("expects a whole number from 0 on, got {}", text) : "";
          },
          ""};
}

}  // namespace kiln::cli
