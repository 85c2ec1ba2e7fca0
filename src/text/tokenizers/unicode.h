// Unicode as tokenizers need it. Predicates name the version of Unicode they follow, because the published
// tokenizers froze theirs at different times and ids depend on it.
#pragma once
#include <string>
#include <string_view>

namespace kiln::text {

// Returns the code point at `position` of valid UTF-8 and moves `position` behind it.
char32_t next_code_point(std::string_view text, size_t& position);
// Returns where the character before `position` begins. REQUIRES: position > 0.
size_t previous_boundary(std::string_view text, size_t position);
void append_utf8(std::string& text, char32_t code_point);
// Throws Error naming the first wrong byte if `text` is no UTF-8.
void check_utf8(std::string_view text);
int64_t count_code_points(std::string_view text);

bool is_space(char32_t c);   // White_Space
bool is_letter(char32_t c);  // L*, Unicode 16
bool is_number(char32_t c);  // N*, Unicode 16

// The predicates of BERT's tokenizer, which follow Unicode 8.
bool is_bert_control(char32_t c);  // removed: Cc, Cf and Co, except tab, carriage return, line feed
bool is_bert_nonspacing_mark(char32_t c);
bool is_bert_punctuation(char32_t c);  // P*, and every ASCII symbol
bool is_bert_ideograph(char32_t c);    // the blocks that it separates into single characters

// Canonical composition and decomposition of valid UTF-8.
std::string nfc(std::string_view text);
std::string nfd(std::string_view text);
// Returns the lower case of each character by itself: a final sigma stays a medial one. Unicode 17.
std::string lower(std::string_view text);

}  // namespace kiln::text
