#include "text/tokenizers/sentencepiece_model.h"

#include <cstring>

#include "core/error.h"
#include "core/files/input_file.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {

namespace {

// Reads the fields of one protocol-buffer message in the order of the bytes.
class MessageReader {
 public:
  MessageReader(std::string_view bytes, const std::string& source) : rest_(bytes), source_(source) {}

  // Moves to the next field. Returns false at the end. number() and one of value() and bytes() belong to the
  // field.
  bool next() {
    if (rest_.empty()) return false;
    const uint64_t tag = varint();
    number_ = tag >> 3;
    bytes_ = {};
    value_ = 0;
    switch (tag & 7) {
      case 0:
        value_ = varint();
        break;
      case 1:
        bytes_ = take(8);
        break;
      case 2:
        bytes_ = take(varint());
        break;
      case 5:
        bytes_ = take(4);
        break;
      default:
        broken();
    }
    return true;
  }

  uint64_t number() const { return number_; }
  uint64_t value() const { return value_; }          // of a number
  std::string_view bytes() const { return bytes_; }  // of a string, a message or a fixed-width number

  float float_value() const {
    if (bytes_.size() != sizeof(float)) broken();
    float value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    return value;
  }

  [[noreturn]] void broken() const { fail("tokenizer", "{} is no SentencePiece model", source_); }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    broken();
  }

  std::string_view take(uint64_t count) {
    if (count > rest_.size()) broken();
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  std::string_view rest_, bytes_;
  const std::string& source_;
  uint64_t number_ = 0, value_ = 0;
};

// Uses the field numbers of sentencepiece_model.proto.
SentencePieceModel::Piece parse_piece(std::string_view bytes, const std::string& source) {
  SentencePieceModel::Piece piece;
  MessageReader fields(bytes, source);
  while (fields.next()) {
    if (fields.number() == 1) piece.text = fields.bytes();
    if (fields.number() == 2) piece.score = fields.float_value();
    if (fields.number() == 3) {
      if (fields.value() < 1 || fields.value() > 6) fields.broken();
      piece.kind = static_cast<SentencePieceModel::PieceKind>(fields.value());
    }
  }
  check_utf8(piece.text);
  return piece;
}

SentencePieceModel::Kind parse_kind(std::string_view trainer, const std::string& source) {
  auto kind = SentencePieceModel::Kind::kUnigram;
  MessageReader fields(trainer, source);
  while (fields.next()) {
    if (fields.number() != 3) continue;
    if (fields.value() < 1 || fields.value() > 4) fields.broken();
    kind = static_cast<SentencePieceModel::Kind>(fields.value());
  }
  return kind;
}

std::string parse_charsmap(std::string_view normalizer, const std::string& source) {
  std::string charsmap;
  MessageReader fields(normalizer, source);
  while (fields.next())
    if (fields.number() == 2) charsmap = fields.bytes();
  return charsmap;
}

// Fields of a unit of the double array.
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & 0x7FFFFFFF; }
uint32_t label_of(uint32_t unit) { return unit & (0x80000000u | 0xFF); }
uint32_t offset_of(uint32_t unit) { return (unit >> 10) << ((unit & 1u << 9) >> 6); }

}  // namespace

SentencePieceModel parse_sentencepiece_model(std::string_view bytes, const std::string& source) {
  SentencePieceModel model;
  MessageReader fields(bytes, source);
  while (fields.next()) {
    if (fields.number() == 1) model.pieces.push_back(parse_piece(fields.bytes(), source));
    if (fields.number() == 2) model.kind = parse_kind(fields.bytes(), source);
    if (fields.number() == 3) model.charsmap = parse_charsmap(fields.bytes(), source);
  }
  if (model.pieces.empty()) fields.broken();
  return model;
}

SentencePieceModel read_sentencepiece_model(const std::filesystem::path& path) {
  constexpr size_t kMostBytes = size_t{256} << 20;
  return parse_sentencepiece_model(read_input("tokenizer", path.string(), kMostBytes), path.string());
}

Charsmap::Charsmap(std::string_view compiled, const std::string& source) {
  if (compiled.empty()) return;
  const auto broken = [&] { fail("tokenizer", "the normalization rules of {} are broken", source); };
  uint32_t trie_bytes = 0;
  if (compiled.size() < sizeof trie_bytes) broken();
  std::memcpy(&trie_bytes, compiled.data(), sizeof trie_bytes);
  compiled.remove_prefix(sizeof trie_bytes);
  if (trie_bytes > compiled.size() || trie_bytes % sizeof(uint32_t) != 0 || trie_bytes == 0) broken();
  units_.resize(trie_bytes / sizeof(uint32_t));
  std::memcpy(units_.data(), compiled.data(), trie_bytes);
  replacements_ = compiled.substr(trie_bytes);
  // apply() checks positions itself but relies on replacements that end.
  if (!replacements_.ends_with('\0')) broken();
}

std::string Charsmap::apply(std::string_view text) const {
  if (units_.empty()) return std::string(text);
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    size_t matched = 0;
    uint32_t replacement = 0;
    size_t position = offset_of(units_[0]);
    for (size_t k = i; k < text.size(); ++k) {
      const auto byte = static_cast<unsigned char>(text[k]);
      position ^= byte;
      if (position >= units_.size() || label_of(units_[position]) != byte) break;
      const bool ends_here = has_leaf(units_[position]);
      position ^= offset_of(units_[position]);
      if (position >= units_.size()) break;
      if (!ends_here) continue;
      matched = k + 1 - i;
      replacement = value_of(units_[position]);
    }
    if (matched > 0 && replacement < replacements_.size()) {
      result += replacements_.data() + replacement;
      i += matched;
    } else {
      append_utf8(result, next_code_point(text, i));
    }
  }
  return result;
}

}  // namespace kiln::text
