#include "extract/caption_sources.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>

#include "core/error.h"
#include "text/tokenizers/unicode.h"

namespace kiln {
namespace {

constexpr std::array<const char*, 2> kPngKeywords = {"Title", "Description"};

void append_data(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions) {
  const auto& own = dataset.records()[index].captions;
  captions.insert(captions.end(), own.begin(), own.end());
}

void append_png_texts(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions) {
  const PngTexts texts = dataset.png_texts(index);
  for (const char* keyword : kPngKeywords)
    for (const auto& [found, text] : texts)
      if (found == keyword) captions.push_back({.text = text, .kind = std::string("PNG ") + keyword});
}

void append_file_name(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions) {
  captions.push_back({.text = caption_of_file_name(dataset.records()[index].name), .kind = "file name"});
}

struct Source {
  const char* name;
  void (*append)(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions);
};
constexpr Source kSources[] = {
    {"data", append_data}, {"png-text", append_png_texts}, {"file-names", append_file_name}};

std::vector<const Source*> parse_sources(const std::string& text) {
  std::vector<const Source*> sources;
  std::istringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    const auto found = std::find_if(std::begin(kSources), std::end(kSources),
                                    [&](const Source& source) { return name == source.name; });
    if (found == std::end(kSources))
      fail("extract", "--captions: expected data, png-text or file-names, or several with commas, got {:?}",
           name);
    sources.push_back(found);
  }
  if (sources.empty()) fail("extract", "--captions: expected data, png-text or file-names");
  return sources;
}

std::string without_outer_space(const std::string& text) {
  constexpr const char* kSpace = " \t\r\n";
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) + 1 - first);
}

}  // namespace

void check_caption_options(const CaptionOptions& options) {
  parse_sources(options.sources);
  text::check_utf8(options.prefix + options.suffix + options.instruction);
}

std::string caption_of_file_name(const std::string& name) {
  std::string stem = std::filesystem::path(name).stem().string();
  for (char& c : stem)
    if (c == '_' || c == '-' || c == '.' || c == '+') c = ' ';
  std::istringstream words(stem);
  std::vector<std::string> kept;
  for (std::string word; words >> word;) kept.push_back(word);
  const auto is_number = [](const std::string& word) {
    return std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  if (kept.size() > 1 && is_number(kept.back())) kept.pop_back();
  std::string caption;
  for (const std::string& word : kept) caption += (caption.empty() ? "" : " ") + word;
  return caption;
}

std::vector<Caption> captions_of(const ImageDataset& dataset, int64_t index, const CaptionOptions& options) {
  std::vector<Caption> found;
  for (const Source* source : parse_sources(options.sources)) source->append(dataset, index, found);
  std::vector<Caption> captions;
  for (Caption& caption : found) {
    try {
      text::check_utf8(caption.text);
    } catch (const Error&) {
      fail("extract", "the caption of {} is no UTF-8: convert the file that holds it",
           dataset.records()[index].name);
    }
    caption.text = without_outer_space(caption.text);
    const bool is_known = std::any_of(captions.begin(), captions.end(), [&](const Caption& other) {
      return other.text == options.prefix + caption.text + options.suffix;
    });
    if (caption.text.empty() || is_known) continue;
    caption.text = options.prefix + caption.text + options.suffix;
    captions.push_back(std::move(caption));
  }
  return captions;
}

}  // namespace kiln
