#include "core/text/json_text.h"

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/utf8.h"

namespace kiln {
namespace {

using nlohmann::json;

// Builds a value from the parser's events. The callback of json::parse() is not used for that: it walks over
// all of a list again for each object in it.
class JsonBuilder : public json::json_sax_t {
 public:
  JsonBuilder(std::string_view who, const std::string& name, const JsonOptions& options)
      : who_(who), name_(name), options_(options) {}

  json take() { return std::move(root_); }
  const std::string& why_not() const { return why_not_; }  // it is no JSON

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(json::number_integer_t value) override { return add(value); }
  bool number_unsigned(json::number_unsigned_t value) override { return add(value); }
  bool number_float(json::number_float_t value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(json::binary_t&) override { return false; }  // not in JSON
  bool start_object(size_t) override { return begin(json::value_t::object); }
  bool start_array(size_t) override { return begin(json::value_t::array); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }
  bool key(std::string& key) override;
  bool parse_error(size_t, const std::string&, const json::exception& error) override {
    why_not_ = message_of(error);
    root_ = json::value_t::discarded;
    return false;
  }

 private:
  template <class Value>
  bool add(Value&& value) {
    if (json* place = next_place()) *place = std::forward<Value>(value);
    return true;
  }
  bool begin(json::value_t type);
  bool end() {
    open_.pop_back();
    return true;
  }
  json* next_place();

  std::string_view who_;
  const std::string& name_;
  const JsonOptions& options_;
  std::string why_not_;
  json root_;
  std::vector<json*> open_;  // objects and arrays around the next value; nullptr: not kept
  json* of_key_ = nullptr;   // the value of the last key; nullptr: not kept
  int64_t num_values_ = 0;
};

// Returns where the next value belongs, nullptr if it is not kept.
json* JsonBuilder::next_place() {
  if (++num_values_ > options_.most_values)
    fail(who_, "{} has more than {} values", name_, options_.most_values);
  if (open_.empty()) return &root_;
  if (open_.back() == nullptr) return nullptr;
  return open_.back()->is_array() ? &open_.back()->emplace_back() : of_key_;
}

bool JsonBuilder::begin(json::value_t type) {
  if (open_.size() == kMostJsonLevels)
    fail(who_, "{} has more than {} nested levels", name_, kMostJsonLevels);
  json* place = next_place();
  if (place) *place = type;
  open_.push_back(place);
  return true;
}

bool JsonBuilder::key(std::string& key) {
  const bool is_kept =
      open_.back() && (open_.size() > 1 || options_.only_key.empty() || key == options_.only_key);
  of_key_ = nullptr;
  if (!is_kept) return true;
  const auto [found, is_new] = open_.back()->get_ref<json::object_t&>().try_emplace(key);
  if (!is_new && options_.refuses_duplicates) fail(who_, "key {:?} occurs twice ({})", key, name_);
  of_key_ = &found->second;
  return true;
}

JsonBuilder build(std::string_view who, std::string_view text, const std::string& name,
                  const JsonOptions& options) {
  if (text.size() > options.most_bytes)
    fail(who, "{} has {} bytes of JSON, at most {} are read", name, text.size(), options.most_bytes);
  JsonBuilder builder(who, name, options);
  json::sax_parse(text, &builder, json::input_format_t::json, /*strict=*/true, options.ignores_comments);
  return builder;
}

}  // namespace

json parse_json(std::string_view who, std::string_view text, const std::string& name,
                const JsonOptions& options) {
  JsonBuilder builder = build(who, text, name, options);
  if (!builder.why_not().empty()) fail(who, "{} is not JSON: {}", name, builder.why_not());
  return builder.take();
}

json json_or_discarded(std::string_view who, std::string_view text, const std::string& name,
                       const JsonOptions& options) {
  return build(who, text, name, options).take();
}

json read_json_file(std::string_view who, const std::string& path, const JsonOptions& options) {
  return parse_json(who, read_input(who, path, options.most_bytes), path, options);
}

json read_json_or_discarded(std::string_view who, const std::string& path) {
  constexpr JsonOptions kLimits;
  return json_or_discarded(who, read_input(who, path, kLimits.most_bytes), path);
}

std::string brief(std::string text) {
  constexpr size_t kMostShown = 100;
  if (text.size() > kMostShown) text.replace(kMostShown, text.npos, "...");
  return text;
}

std::string brief(const json& value) { return brief(dump_utf8(value)); }

}  // namespace kiln
