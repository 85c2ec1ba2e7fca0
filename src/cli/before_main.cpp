// What is settled before main().
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "cli/ready_texts.h"

// jemalloc reads this at start-up. A training step frees and allocates the same large tensors every time. If
// they were given back to the system in between, each would fault in its pages anew (6,161 faults for 25 MB),
// so freed pages are kept. A tensor may be placed in a free block of any size. By default that is at most 64
// times its own: what an evaluation had freed became one block, which the next could not use, and so on. One
// arena serves all threads: with four for each processor, a thread of an evaluation came to another one each
// time, until every arena had kept what any thread ever needed. What has 16 KiB or more lies in one of its
// own: small blocks that stay would lie all over the room in which a step makes its tensors, and divide it,
// so that it widened. What has 2 MiB or more lies apart again, in huge pages (core/allocations.cpp).
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf =
    "narenas:1,background_thread:false,dirty_decay_ms:-1,muzzy_decay_ms:-1,"
    "oversize_threshold:16384,lg_extent_max_active_fit:64";
}

#ifndef __SANITIZE_ADDRESS__  // it has to be the first to run
namespace {

// True if the program was given these words: "train --help".
bool asks_for(std::string_view words, char** given) {
  for (; *given != nullptr; ++given) {
    const std::string_view word = words.substr(0, words.find(' '));
    const std::string_view argument = *given == std::string_view("-h") ? "--help" : *given;
    if (words.empty() || argument != word) return false;
    words.remove_prefix(word.size() < words.size() ? word.size() + 1 : word.size());
  }
  return words.empty();
}

// Returns false if the text could not be written.
bool print(int to, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(to, text.data(), text.size());
    if (written < 0 && errno != EINTR) return false;
    text.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
  return true;
}

// Prints a text that was asked for and ends the process, before libraries are initialised. KILN_CPU may be
// one that is refused.
void print_ready_text(int, char** arguments, char** environment) {
  if (kiln::cli::kReadyTexts == nullptr || arguments[0] == nullptr) return;
  for (; *environment != nullptr; ++environment)
    if (std::string_view(*environment).starts_with("KILN_CPU=")) return;
  for (const kiln::cli::ReadyText* ready = kiln::cli::kReadyTexts; ready->text != nullptr; ++ready)
    if (asks_for(ready->arguments, arguments + 1)) {
      if (print(STDOUT_FILENO, ready->text)) _exit(0);
      print(STDERR_FILENO, "kiln: cannot write the output\n");
      _exit(1);
    }
}

__attribute__((section(".preinit_array"), used)) void (*const kBeforeLibraries)(int, char**,
                                                                                char**) = print_ready_text;

}  // namespace
#endif
