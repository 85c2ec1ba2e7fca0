#include "emoji_font.h"

#include <ft2build.h>
#include FT_FREETYPE_H
#include <hb-ft.h>
#include <hb.h>

#include "core/error.h"

namespace kiln::demo {

struct EmojiFont::Impl {
  FT_Library library = nullptr;
  FT_Face face = nullptr;
  hb_font_t* shaper = nullptr;
  ~Impl() {
    if (shaper) hb_font_destroy(shaper);
    if (face) FT_Done_Face(face);
    if (library) FT_Done_FreeType(library);
  }
};

EmojiFont::EmojiFont(const std::string& path) : impl_(std::make_unique<Impl>()) {
  if (FT_Init_FreeType(&impl_->library) != 0) fail("demo-data", "cannot start FreeType");
  if (FT_New_Face(impl_->library, path.c_str(), 0, &impl_->face) != 0)
    fail("demo-data",
         "cannot read the font {}: install Debian's package fonts-noto-color-emoji or give --font", path);
  if (!FT_HAS_COLOR(impl_->face) || impl_->face->num_fixed_sizes < 1 || FT_Select_Size(impl_->face, 0) != 0)
    fail("demo-data", "expected a font of colour bitmaps, got another ({})", path);
  impl_->shaper = hb_ft_font_create_referenced(impl_->face);
}

EmojiFont::~EmojiFont() = default;

std::optional<uint32_t> EmojiFont::glyph_of(const std::vector<uint32_t>& code_points) const {
  const std::unique_ptr<hb_buffer_t, decltype(&hb_buffer_destroy)> buffer(hb_buffer_create(),
                                                                          hb_buffer_destroy);
  hb_buffer_add_utf32(buffer.get(), code_points.data(), static_cast<int>(code_points.size()), 0,
                      static_cast<int>(code_points.size()));
  hb_buffer_guess_segment_properties(buffer.get());
  hb_buffer_set_flags(buffer.get(), HB_BUFFER_FLAG_REMOVE_DEFAULT_IGNORABLES);
  hb_shape(impl_->shaper, buffer.get(), nullptr, 0);
  unsigned count = 0;
  const hb_glyph_info_t* glyphs = hb_buffer_get_glyph_infos(buffer.get(), &count);
  if (count != 1 || glyphs[0].codepoint == 0) return std::nullopt;
  return glyphs[0].codepoint;
}

Image EmojiFont::draw(uint32_t glyph, int64_t size) const {
  if (FT_Load_Glyph(impl_->face, glyph, FT_LOAD_COLOR | FT_LOAD_RENDER) != 0)
    fail("demo-data", "cannot draw glyph {}", glyph);
  const FT_Bitmap& bitmap = impl_->face->glyph->bitmap;
  if (bitmap.pixel_mode != FT_PIXEL_MODE_BGRA)
    fail("demo-data", "expected a colour bitmap, got another ({})", glyph);
  Image image{size, size, std::vector<uint8_t>(size * size * 3, 255)};
  const int64_t top = (size - bitmap.rows) / 2, left = (size - static_cast<int64_t>(bitmap.width)) / 2;
  for (int64_t y = 0; y < bitmap.rows; ++y) {
    for (int64_t x = 0; x < bitmap.width; ++x) {
      const int64_t target_y = top + y, target_x = left + x;
      if (target_y < 0 || target_y >= size || target_x < 0 || target_x >= size) continue;
      const uint8_t* bgra = bitmap.buffer + y * bitmap.pitch + 4 * x;  // colours are premultiplied by alpha
      uint8_t* rgb = image.rgb.data() + (target_y * size + target_x) * 3;
      for (int c = 0; c < 3; ++c) rgb[c] = static_cast<uint8_t>(bgra[2 - c] + 255 - bgra[3]);
    }
  }
  return image;
}

}  // namespace kiln::demo
