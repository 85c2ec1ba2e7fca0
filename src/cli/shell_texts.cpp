#include "cli/shell_texts.h"

#include <sstream>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "core/error.h"
#include "core/files/text_file.h"

namespace kiln::cli {

namespace {

// A word that may follow, and what it is for.
struct Word {
  std::string text, help;
};

// The program or a command, by its whole name: "kiln", "kiln store import".
struct Place {
  std::string name, help;
  std::vector<Word> commands{};  // and the values of an argument without a name
  std::vector<const CLI::Option*> options{};
};

bool takes_value(const CLI::Option& option) { return option.get_type_size() != 0; }

std::string first_sentence(const std::string& help) { return help.substr(0, help.find_first_of(";\n")); }

// Returns the names that the type "{f32,bf16,fp16}" lists; none of another type.
std::vector<Word> named_values(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  std::vector<Word> values;
  if (!takes_value(option) || !type.starts_with('{') || !type.ends_with('}')) return values;
  std::istringstream names(type.substr(1, type.size() - 2));
  for (std::string name; std::getline(names, name, ',');) values.push_back({name, ""});
  return values;
}

void append_places(const CLI::App& app, const std::string& name, std::vector<Place>& places) {
  Place place{.name = name, .help = app.get_description()};
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* command : commands)
    place.commands.push_back({command->get_name(), first_sentence(command->get_description())});
  place.options = app.get_options();
  for (const CLI::Option* option : place.options)
    if (option->get_positional())
      for (const Word& value : named_values(*option)) place.commands.push_back(value);
  places.push_back(std::move(place));
  for (const CLI::App* command : commands) append_places(*command, name + " " + command->get_name(), places);
}

std::vector<Place> places_of(const CLI::App& program) {
  std::vector<Place> places;
  append_places(program, program.get_name(), places);
  return places;
}

std::vector<Word> option_words(const Place& place) {
  std::vector<Word> words;
  for (const CLI::Option* option : place.options)
    for (const std::string& name : option->get_lnames())
      words.push_back({"--" + name, first_sentence(option->get_description())});
  return words;
}

std::string joined(const std::vector<Word>& words) {
  std::string text;
  for (const Word& word : words) text += (text.empty() ? "" : " ") + word.text;
  return text;
}

// 'word:help' for each, as _describe of zsh reads it.
std::string described(const std::vector<Word>& words) {
  std::string text;
  for (const Word& word : words) {
    const std::string help = word.help.empty() ? "" : ":" + replaced(word.help, "'", R"('\'')");
    text += (text.empty() ? "'" : " '") + word.text + help + "'";
  }
  return text;
}

// The branches of `case` in which a script finds what may follow.
struct Branches {
  std::string commands{};                                // the pattern of all: "kiln train" | "kiln plan"
  std::string options_at{}, commands_at{}, values_of{};  // set what is offered, by place or option
};

// `set`: the statement that offers the words, whose list `list` makes.
Branches branches_of(const std::vector<Place>& places, fmt::format_string<std::string> set,
                     std::string (*list)(const std::vector<Word>&)) {
  Branches branches;
  const auto branch = [&](const std::string& at, const std::vector<Word>& words) {
    return words.empty() ? "" : fmt::format("      \"{}\") {} ;;\n", at, fmt::format(set, list(words)));
  };
  for (const Place& place : places) {
    if (&place != &places.front())
      branches.commands += (branches.commands.empty() ? "\"" : " | \"") + place.name + "\"";
    branches.options_at += branch(place.name, option_words(place));
    branches.commands_at += branch(place.name, place.commands);
    for (const CLI::Option* option : place.options)
      for (const std::string& name : option->get_lnames())
        branches.values_of += branch(place.name + " --" + name, named_values(*option));
  }
  return branches;
}

// Offers options to a word that begins with "-", else the values of the option before it, else commands, and
// files where there is none of these.
std::string bash_script(const std::vector<Place>& places) {
  const Branches branches = branches_of(places, "words=\"{}\"", joined);
  return fmt::format(
      R"(_kiln() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} at=kiln words="" i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$at ${{COMP_WORDS[i]}}" in {0}) at+=" ${{COMP_WORDS[i]}}" ;; esac
  done
  if [[ $word == -* ]]; then
    case "$at" in
{1}    esac
  else
    case "$at" in
{2}    esac
    case "$at $before" in
{3}    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kiln kiln
)",
      branches.commands, branches.options_at, branches.commands_at, branches.values_of);
}

std::string zsh_script(const std::vector<Place>& places) {
  const Branches branches = branches_of(places, "found=({})", described);
  return fmt::format(
      R"(#compdef kiln
_kiln() {{
  local at=kiln i
  local -a found
  for ((i = 2; i < CURRENT; ++i)); do
    case "$at $words[i]" in ({0}) at+=" $words[i]" ;; esac
  done
  if [[ $words[CURRENT] == -* ]]; then
    case "$at" in
{1}    esac
  else
    case "$at" in
{2}    esac
    case "$at $words[CURRENT-1]" in
{3}    esac
  fi
  if (( $#found )); then _describe -t words word found; else _files; fi
}}
if [[ $funcstack[1] == _kiln ]]; then _kiln "$@"; else compdef _kiln kiln; fi
)",
      branches.commands, branches.options_at, branches.commands_at, branches.values_of);
}

std::string fish_script(const std::vector<Place>& places) {
  std::string names, rules;
  const auto quoted = [](const std::string& text) {
    return "'" + replaced(replaced(text, "\\", "\\\\"), "'", "\\'") + "'";
  };
  for (const Place& place : places) {
    if (&place != &places.front()) names += " " + quoted(place.name);
    const std::string rule = "complete -c kiln -n \"__kiln_at '" + place.name + "'\"";
    for (const Word& word : place.commands)
      rules += fmt::format("{} -f -a {} -d {}\n", rule, word.text, quoted(word.help));
    for (const CLI::Option* option : place.options) {
      const std::string values = joined(named_values(*option));
      const std::string takes = !values.empty()        ? " -x -a " + quoted(values)
                                : takes_value(*option) ? std::string(" -r")
                                                       : std::string();
      for (const std::string& name : option->get_lnames())
        rules += fmt::format("{} -l {}{} -d {}\n", rule, name, takes,
                             quoted(first_sentence(option->get_description())));
    }
  }
  return fmt::format(R"(function __kiln_at
  set -l at kiln
  for word in (commandline -opc)[2..-1]
    if contains -- "$at $word"{0}
      set at "$at $word"
    end
  end
  test "$at" = "$argv[1]"
end
{1})",
                     names, rules);
}

// Escapes what roff would obey.
std::string roff(const std::string& text) {
  const std::string escaped = replaced(replaced(text, "\\", "\\e"), "-", "\\-");
  std::string lines = replaced(escaped, "\n", "\n.br\n\\&");
  return lines.starts_with('.') || lines.starts_with('\'') ? "\\&" + lines : lines;
}

std::string man_option(const CLI::Option& option) {
  const std::string name = option.get_name(/*positional=*/!option.nonpositional(), /*all_options=*/true);
  std::string value = takes_value(option) ? option.get_type_name() : "";
  if (!value.empty() && !option.get_default_str().empty()) value += "=" + option.get_default_str();
  return fmt::format(".TP\n\\fB{}\\fR{}{}\n{}\n", roff(name), value.empty() ? "" : " ", roff(value),
                     roff(option.get_description()));
}

}  // namespace

std::string completion_script(const CLI::App& program, const std::string& shell) {
  const std::vector<Place> places = places_of(program);
  if (shell == "bash") return bash_script(places);
  if (shell == "zsh") return zsh_script(places);
  if (shell == "fish") return fish_script(places);
  fail("completion", "expected bash, zsh or fish, got {:?}", shell);
}

std::string man_page(const CLI::App& program, const std::string& version) {
  std::string text = fmt::format(
      ".TH KILN 1 \"\" \"kiln {}\" \"User Commands\"\n.SH NAME\nkiln \\- train and run latent diffusion "
      "models\n.SH SYNOPSIS\n\\fBkiln\\fR COMMAND [OPTION]...\n.SH DESCRIPTION\n{}\n.SH COMMANDS\n",
      roff(version), roff(program.get_description()));
  for (const Place& place : places_of(program)) {
    const bool is_program = place.name == program.get_name();
    if (!is_program) text += fmt::format(".SS {}\n{}\n", roff(place.name), roff(place.help));
    for (const CLI::Option* option : place.options)
      if (is_program || !option->check_name("--help")) text += man_option(*option);
  }
  return text + ".SH EXIT STATUS\n0 done, 1 refused or failed, 2 a command line that cannot be read\n";
}

void add_completion_command(CLI::App& app) {
  auto* command = app.add_subcommand("completion",
                                     "Print what makes a shell complete commands, options and their values");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")->required()->type_name("{bash,zsh,fish}");
  command->footer(
      "bash: source <(kiln completion bash), in ~/.bashrc\nzsh: source <(kiln completion zsh), in ~/.zshrc "
      "after compinit\nfish: kiln completion fish > ~/.config/fish/completions/kiln.fish");
  command->callback([&app, shell] { fmt::print("{}", completion_script(app, *shell)); });
}

void add_man_command(CLI::App& app) {
  auto* command = app.add_subcommand("man", "Print a page for man of all commands and options");
  command->footer("kiln man > ~/.local/share/man/man1/kiln.1, then: man kiln");
  command->callback([&app] { fmt::print("{}", man_page(app, build_identity())); });
}

}  // namespace kiln::cli
