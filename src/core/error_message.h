// What an error of any library comes to in one line. Torch-free.
#pragma once
#include <exception>
#include <string>

namespace kiln {

// what() without the backtrace that LibTorch adds, and without the place in the source that c10d puts first:
// "[/path/pair.cc:538] Connection closed" is "Connection closed".
std::string message_of(const std::exception& error);

// The same without "[who] ", for a message that names somebody else.
std::string bare_message_of(const std::exception& error);

}  // namespace kiln
