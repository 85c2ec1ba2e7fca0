// Text from outside on a terminal. Torch-free.
#pragma once
#include <string>
#include <string_view>

namespace kiln {

// Returns the text with \xNN in the place of what a terminal could obey or a reader be misled by: control
// characters, line ends too, those that turn the direction of text, and bytes that are not UTF-8. `kept`:
// characters that stay, like the line ends of our own messages.
std::string printable(std::string_view text, std::string_view kept = "");

}  // namespace kiln
