// Which files kiln convert may replace.
#pragma once
#include <string>

namespace kiln {

// Throws Error if the weights file, or the FILE.json of a .pt file, is there and of another program, unless
// it may be overwritten.
void check_replaceable(const std::string& path, bool overwrite);
// The same for another file beside it, which has `content` if Kiln wrote it.
void check_replaceable(const std::string& path, const std::string& content, bool overwrite);

}  // namespace kiln
