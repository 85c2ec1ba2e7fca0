// kiln-texts FILE: writes a source file with the texts of cli/ready_texts.h. The build runs it.
#include "cli/ready_texts.h"

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/shell_texts.h"
#include "core/command_line.h"
#include "core/files/atomic_file.h"

namespace {

std::string entry(const std::string& arguments, const std::string& text) {
  return fmt::format("    {{\"{}\", R\"text({})text\"}},\n", arguments, text);
}

std::string help_texts(const CLI::App& app, const std::string& parent, const std::string& arguments) {
  std::string texts = entry(arguments + "--help", app.help(parent)) +
                      entry(arguments + "--help all", app.help(parent, CLI::AppFormatMode::All));
  const std::string name = parent.empty() ? app.get_name() : parent + " " + app.get_name();
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    texts += help_texts(*command, name, arguments + command->get_name() + " ");
  return texts;
}

std::string source_of_texts() {
  CLI::App program;
  kiln::cli::make_program(program);
  std::string texts = help_texts(program, "", "") + entry("--version", program.version() + "\n") +
                      entry("man", kiln::cli::man_page(program, kiln::cli::build_identity()));
  for (const char* shell : {"bash", "zsh", "fish"})
    texts += entry(std::string("completion ") + shell, kiln::cli::completion_script(program, shell));
  return fmt::format(
      "// Made by cli/ready_texts.cpp.\n#include \"cli/ready_texts.h\"\n\nnamespace kiln::cli {{\n\n"
      "const ReadyText kReadyTexts[] = {{\n{}    {{nullptr, nullptr}}}};\n\n}}  // namespace kiln::cli\n",
      texts);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Writes a source file with the texts that kiln prints at once.", "kiln-texts"};
  std::string file;
  app.add_option("file", file)->required();
  app.callback([&] { kiln::write_file_atomically("kiln-texts", file, source_of_texts()); });
  return kiln::run_command_line(app, argc, argv);
}
