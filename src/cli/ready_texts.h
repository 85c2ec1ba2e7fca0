// Texts that depend on nothing but the program: help, completion, the page for man. They are linked into it,
// so that it prints them before its libraries initialise themselves, of which LibTorch takes 0.3 s.
// Torch-free.
#pragma once

namespace kiln::cli {

struct ReadyText {
  const char* arguments;  // "train --help"
  const char* text;
};

// Ends with nulls. It is null in programs without such texts.
extern const ReadyText kReadyTexts[] __attribute__((weak));

}  // namespace kiln::cli
