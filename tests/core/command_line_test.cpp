#include "core/command_line.h"

#include <CLI/CLI.hpp>
#include <stdexcept>

#include "test_files.h"

namespace kiln {
namespace {

struct Outcome {
  int status = 0;
  std::string errors, text;
};

// A program "tool" with the commands draw (--max-steps N, required, --fast, --brush; help shows the first and
// the last) and paint, which calls that option --pen too, and throws.
Outcome run(std::vector<std::string> arguments) {
  CLI::App app{"A tool.", "tool"};
  app.require_subcommand(1);
  int steps = 0;
  bool fast = false;
  CLI::App* draw = app.add_subcommand("draw", "Draws");
  draw->add_option("--max-steps", steps, "Steps")->required();
  draw->add_flag("--fast", fast, "Fast");
  std::string brush;
  draw->add_option("--brush", brush, "Brush");
  show_first(*draw, {"--max-steps", "--brush"});
  CLI::App* paint = app.add_subcommand("paint", "Paints");
  paint->add_option("--pen,--brush", brush, "Brush");
  paint->callback([] { fail("paint", "no colour is left: buy some"); });
  app.add_subcommand("crash", "Breaks")->callback([] {
    throw std::runtime_error("shapes differ\nException raised from f at g.cpp:3\nframe #0: h()");
  });
  arguments.insert(arguments.begin(), "tool");
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  Outcome outcome;
  const auto run_it = [&] {
    outcome.status = run_command_line(app, static_cast<int>(pointers.size()), pointers.data());
  };
  outcome.errors = stderr_of([&] { outcome.text = stdout_of(run_it); });
  return outcome;
}

TEST(CommandLine, ErrorsAreOneLineThatSaysWhatToDo) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"draw", "--max-stepz", "3"},
       "tool draw: unknown option --max-stepz: did you mean --max-steps? (tool draw --help)\n"},
      {{"draw", "--max-stepz=3"},
       "tool draw: unknown option --max-stepz: did you mean --max-steps? (tool draw --help)\n"},
      {{"draw", "--max-steps", "3", "4"}, "tool draw: unexpected argument '4' (tool draw --help)\n"},
      {{"draw", "--max-steps", "many"},
       "tool draw: --max-steps expects a whole number, got 'many' (tool draw --help)\n"},
      {{"draw", "--max-steps", "1e3"},
       "tool draw: --max-steps expects a whole number, got '1e3' (tool draw --help)\n"},
      {{"draw"}, "tool draw: --max-steps is required (tool draw --help)\n"},
      {{"drew", "--fast"}, "tool: unknown command 'drew': did you mean 'draw'? (tool --help)\n"},
      // NewUser10: words, another command's name for it, and nothing where nothing is near.
      {{"draw", "--steps", "3"},
       "tool draw: unknown option --steps: did you mean --max-steps? (tool draw --help)\n"},
      {{"draw", "--pen", "x"}, "tool draw: unknown option --pen: did you mean --brush? (tool draw --help)\n"},
      {{"draw", "--zoom", "3"}, "tool draw: unknown option --zoom (tool draw --help)\n"},
      {{"sculpt"}, "tool: unknown command 'sculpt': expected a command: draw, paint, crash (tool --help)\n"},
      {{}, "tool: expected a command: draw, paint, crash (tool --help)\n"},
      {{"paint"}, "tool paint: no colour is left: buy some\n"},
      {{"crash"}, "tool crash: shapes differ\n"}};
  for (const auto& [arguments, expected] : cases) {
    const Outcome outcome = run(arguments);
    EXPECT_NE(outcome.status, 0) << expected;
    EXPECT_EQ(outcome.errors, expected);
  }
}

TEST(CommandLine, AWrongCommandLineEndsWithTwoAndAFailureWithOne) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {}, {"drew"}, {"draw"}, {"draw", "--max-stepz", "3"}, {"draw", "--max-steps", "many"}})
    EXPECT_EQ(run(arguments).status, 2);
  for (const char* command : {"paint", "crash"}) EXPECT_EQ(run({command}).status, 1);
}

TEST(CommandLine, HelpShowsTheFirstOptionsAndHelpAllEveryOne) {
  const Outcome first = run({"draw", "--help"}), all = run({"draw", "--help", "all"});
  EXPECT_EQ(first.status, 0);
  EXPECT_EQ(all.status, 0);
  for (const char* option : {"--max-steps INT REQUIRED", "--brush TEXT"}) {
    EXPECT_THAT(first.text, HasSubstr(option));
    EXPECT_THAT(all.text, HasSubstr(option));
  }
  EXPECT_THAT(first.text, Not(HasSubstr("TEXT=")));  // nothing is its default
  EXPECT_THAT(first.text, Not(HasSubstr("--fast")));
  EXPECT_TRUE(first.text.ends_with("\ntool draw --help all: the rest\n")) << first.text;
  EXPECT_THAT(all.text, HasSubstr("--fast"));
  EXPECT_THAT(all.text, Not(HasSubstr("the rest")));
  EXPECT_EQ(run({"draw", "-h", "all"}).text, all.text);
  EXPECT_THAT(run({"paint", "--help"}).text, Not(HasSubstr("the rest")));
}

TEST(CommandLine, WhatIsRightRuns) {
  const Outcome outcome = run({"draw", "--max-steps", "3", "--fast"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.errors, "");
}

TEST(ErrorMessage, HasNeitherBacktraceNorWhoRaisedIt) {
  EXPECT_EQ(kiln::message_of(std::runtime_error("[/a/pair.cc:5] Connection closed\nframe #1")),
            "Connection closed");
  EXPECT_EQ(kiln::message_of(std::runtime_error("[json.exception.type_error.302] a number")), "a number");
  EXPECT_EQ(kiln::message_of(Error("[who] what\nand more")), "what\nand more");
  EXPECT_EQ(kiln::message_of(std::runtime_error("[/open")), "[/open");
}

}  // namespace
}  // namespace kiln
