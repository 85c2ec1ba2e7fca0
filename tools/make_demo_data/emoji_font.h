// The colour bitmaps of an emoji font.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/images/images.h"

namespace kiln::demo {

class EmojiFont {
 public:
  // Throws Error: not a font, or one without colour bitmaps.
  explicit EmojiFont(const std::string& path);
  ~EmojiFont();
  EmojiFont(const EmojiFont&) = delete;
  EmojiFont& operator=(const EmojiFont&) = delete;

  // The one glyph that the font has for the sequence; none when it would draw several.
  std::optional<uint32_t> glyph_of(const std::vector<uint32_t>& code_points) const;
  // The glyph's bitmap at its own size, centred on a white square of `size` pixels (what sticks out is cut).
  Image draw(uint32_t glyph, int64_t size) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kiln::demo
