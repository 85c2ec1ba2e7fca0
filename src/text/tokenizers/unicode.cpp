#include "text/tokenizers/unicode.h"

#include <unicode/uchar.h>
#include <unicode/unorm2.h>
#include <unicode/ustring.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "core/text/utf8.h"

namespace kiln::text {
namespace {

struct Range {
  char32_t first, last;
};

template <size_t N>
bool is_within(const std::array<Range, N>& ranges, char32_t c) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [c](const Range& range) { return c >= range.first && c <= range.last; });
}

// Letters assigned after Unicode 15, the version that Debian's ICU knows.
constexpr std::array<Range, 22> kLaterLetters = {
    {{0x1C89, 0x1C8A},   {0xA7CB, 0xA7CD},   {0xA7DA, 0xA7DC},   {0x105C0, 0x105F3}, {0x10D4A, 0x10D65},
     {0x10D6F, 0x10D85}, {0x10EC2, 0x10EC4}, {0x11380, 0x11389}, {0x1138B, 0x1138B}, {0x1138E, 0x1138E},
     {0x11390, 0x113B5}, {0x113B7, 0x113B7}, {0x113D1, 0x113D1}, {0x113D3, 0x113D3}, {0x11BC0, 0x11BE0},
     {0x13460, 0x143FA}, {0x16100, 0x1611D}, {0x16D40, 0x16D6C}, {0x18CFF, 0x18CFF}, {0x1E5D0, 0x1E5ED},
     {0x1E5F0, 0x1E5F0}, {0x2EBF0, 0x2EE5D}}};
constexpr std::array<Range, 7> kLaterNumbers = {{{0x10D40, 0x10D49},
                                                 {0x116D0, 0x116E3},
                                                 {0x11BF0, 0x11BF9},
                                                 {0x16130, 0x16139},
                                                 {0x16D70, 0x16D79},
                                                 {0x1CCF0, 0x1CCF9},
                                                 {0x1E5F1, 0x1E5FA}}};
constexpr std::array<Range, 7> kBertIdeographs = {{{0x3400, 0x4DBF},
                                                   {0x4E00, 0x9FFF},
                                                   {0xF900, 0xFAFF},
                                                   {0x20000, 0x2A6DF},
                                                   {0x2A700, 0x2B81F},
                                                   {0x2B920, 0x2CEAF},
                                                   {0x2F800, 0x2FA1F}}};

// Returns the lower case of letters assigned after Unicode 15, and any other letter unchanged.
char32_t later_lower(char32_t c) {
  if (c >= 0x10D50 && c <= 0x10D65) return c + 0x20;
  if (c >= 0x16EA0 && c <= 0x16EB8) return c + 0x1B;
  switch (c) {
    case 0xA7CB:
      return 0x264;
    case 0xA7DC:
      return 0x19B;
    case 0x1C89:
    case 0xA7CC:
    case 0xA7CE:
    case 0xA7D2:
    case 0xA7D4:
    case 0xA7DA:
      return c + 1;
    default:
      return c;
  }
}

bool is_of_unicode_8(char32_t c) {
  UVersionInfo age;
  u_charAge(static_cast<UChar32>(c), age);
  return age[0] >= 1 && age[0] <= 8;
}

int category(char32_t c) { return u_charType(static_cast<UChar32>(c)); }

std::string normalized(std::string_view text, const UNormalizer2* (*instance)(UErrorCode*),
                       std::string_view who) {
  if (std::all_of(text.begin(), text.end(), [](char byte) { return static_cast<signed char>(byte) >= 0; }))
    return std::string(text);
  UErrorCode status = U_ZERO_ERROR;
  const UNormalizer2* normalizer = instance(&status);
  std::vector<UChar> wide(text.size());
  int32_t length = 0;
  u_strFromUTF8(wide.data(), static_cast<int32_t>(wide.size()), &length, text.data(),
                static_cast<int32_t>(text.size()), &status);
  if (U_FAILURE(status)) fail(who, "a text could not be normalized: {}", u_errorName(status));
  std::vector<UChar> result(static_cast<size_t>(length) * 4 + 16);
  int32_t result_length = unorm2_normalize(normalizer, wide.data(), length, result.data(),
                                           static_cast<int32_t>(result.size()), &status);
  if (status == U_BUFFER_OVERFLOW_ERROR) {
    status = U_ZERO_ERROR;
    result.resize(static_cast<size_t>(result_length));
    result_length = unorm2_normalize(normalizer, wide.data(), length, result.data(), result_length, &status);
  }
  std::string utf8(static_cast<size_t>(result_length) * 3, '\0');
  int32_t num_bytes = 0;
  u_strToUTF8(utf8.data(), static_cast<int32_t>(utf8.size()), &num_bytes, result.data(), result_length,
              &status);
  if (U_FAILURE(status) && status != U_STRING_NOT_TERMINATED_WARNING)
    fail(who, "a text could not be normalized: {}", u_errorName(status));
  utf8.resize(static_cast<size_t>(num_bytes));
  return utf8;
}

}  // namespace

char32_t next_code_point(std::string_view text, size_t& position) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(position);
  if (first < 0x80) return text[position++];
  const int length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  char32_t code_point = first & (0xFFu >> (length + 1));
  for (int i = 1; i < length; ++i) code_point = code_point << 6 | (byte(position + i) & 0x3Fu);
  position += length;
  return code_point;
}

size_t previous_boundary(std::string_view text, size_t position) {
  do --position;
  while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80);
  return position;
}

void append_utf8(std::string& text, char32_t c) {
  const auto put = [&](unsigned byte) { text.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xC0 | c >> 6);
  } else {
    if (c < 0x10000) {
      put(0xE0 | c >> 12);
    } else {
      put(0xF0 | c >> 18);
      put(0x80 | (c >> 12 & 0x3F));
    }
    put(0x80 | (c >> 6 & 0x3F));
  }
  put(0x80 | (c & 0x3F));
}

void check_utf8(std::string_view text) {
  for (size_t i = 0, count = 0; i < text.size(); i += count) {
    count = utf8_bytes(text.substr(i));
    if (count == 0)
      fail("text", "expected text in UTF-8, got byte 0x{:02x} at position {}",
           static_cast<unsigned char>(text[i]), i);
  }
}

int64_t count_code_points(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; });
}

bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)); }

bool is_letter(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_L_MASK) != 0 || is_within(kLaterLetters, c);
}

bool is_number(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_N_MASK) != 0 || is_within(kLaterNumbers, c);
}

bool is_bert_control(char32_t c) {
  if (c == '\t' || c == '\n' || c == '\r') return false;
  if (c == 0xFFFD) return true;
  const int kind = category(c);
  return kind == U_CONTROL_CHAR || kind == U_PRIVATE_USE_CHAR ||
         (kind == U_FORMAT_CHAR && is_of_unicode_8(c));
}

bool is_bert_nonspacing_mark(char32_t c) {
  // These changed their category after Unicode 8.
  if (c == 0x1734) return true;
  if (c == 0x1885 || c == 0x1886 || c == 0xA9BD || c == 0x111C9) return false;
  return category(c) == U_NON_SPACING_MARK && is_of_unicode_8(c);
}

bool is_bert_punctuation(char32_t c) {
  if (c < 0x80) return c > ' ' && c != 0x7F && !u_isalnum(static_cast<UChar32>(c));
  if (c == 0x166D || c == 0x111C9) return true;  // they changed their category after Unicode 8
  return u_ispunct(static_cast<UChar32>(c)) && is_of_unicode_8(c);
}

bool is_bert_ideograph(char32_t c) { return is_within(kBertIdeographs, c); }

std::string nfc(std::string_view text) { return normalized(text, unorm2_getNFCInstance, "nfc"); }

std::string nfd(std::string_view text) { return normalized(text, unorm2_getNFDInstance, "nfd"); }

std::string lower(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (c == 0x130) {  // the only letter that becomes two characters
      result += "i\u0307";
      continue;
    }
    const char32_t known = static_cast<char32_t>(u_tolower(static_cast<UChar32>(c)));
    append_utf8(result, known == c ? later_lower(c) : known);
  }
  return result;
}

}  // namespace kiln::text
