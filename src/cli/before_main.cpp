// What is settled before main().
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "cli/ready_texts.h"

// jemalloc reads this at start-up. A training step frees and allocates the same large tensors every time. If
// they were given back to the system in between, each would fault in its pages anew (6,161 faults for 25 MB),
// so freed pages are kept.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf =
    "background_thread:false,dirty_decay_ms:-1,muzzy_decay_ms:-1,metadata_thp:auto,thp:always";
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

void print(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// Prints a text that was asked for and ends the process. KILN_CPU may be one that is refused.
void print_ready_text(char** arguments, char** environment) {
  if (kiln::cli::kReadyTexts == nullptr || arguments[0] == nullptr) return;
  for (; *environment != nullptr; ++environment)
    if (std::string_view(*environment).starts_with("KILN_CPU=")) return;
  for (const kiln::cli::ReadyText* ready = kiln::cli::kReadyTexts; ready->text != nullptr; ++ready)
    if (asks_for(ready->arguments, arguments + 1)) {
      print(ready->text);
      _exit(0);
    }
}

// A program that was started as /proc/self/exe is called "exe" where processes are listed and ended by name.
void take_name(const char* path) {
  if (path == nullptr) return;
  const char* slash = std::strrchr(path, '/');
  prctl(PR_SET_NAME, slash != nullptr ? slash + 1 : path);
}

// Threads of libgomp that wait for each other spin for milliseconds, on processors that another program may
// need. libgomp reads the bound when it is loaded, before main() and before its environment can be changed:
// the program starts itself again with one, which takes some 10 ms here, where no library has been
// initialised.
void bound_spinning(char** arguments, char** environment) {
  if (getauxval(AT_BASE) == 0) return;  // /proc/self/exe is the loader, called by name with the program
  static std::array<char*, 4096> bounded;
  static std::array<char, 21> bound = std::to_array("GOMP_SPINCOUNT=10000");
  size_t size = 0;
  for (; environment[size] != nullptr; ++size) {
    const std::string_view variable = environment[size];
    if (variable.starts_with("GOMP_SPINCOUNT=") || variable.starts_with("OMP_WAIT_POLICY="))
      return take_name(arguments[0]);
    if (size + 2 >= bounded.size()) return;
    bounded[size] = environment[size];
  }
  bounded[size] = bound.data();
  execve("/proc/self/exe", arguments, bounded.data());  // where it fails, threads spin
}

void before_libraries(int, char** arguments, char** environment) {
  print_ready_text(arguments, environment);
  bound_spinning(arguments, environment);
}

__attribute__((section(".preinit_array"), used)) void (*const kBeforeLibraries)(int, char**,
                                                                                char**) = before_libraries;

}  // namespace
#endif
