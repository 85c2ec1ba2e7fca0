#include "sample/subjects.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/philox.h"
#include "core/text/nearest_name.h"
#include "core/units.h"
#include "text/tokenizers/unicode.h"

namespace kiln {

namespace {

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

int64_t select_class(const std::string& wanted, const std::vector<std::string>& names, int64_t num_classes) {
  for (size_t i = 0; i < names.size(); ++i)
    if (lower(names[i]) == lower(wanted)) return static_cast<int64_t>(i);
  if (const std::optional<int64_t> number = whole_number(wanted)) {
    if (*number >= 0 && *number < num_classes) return *number;
    fail("sample", "expected --classes in 0..{}, got {}", num_classes - 1, *number);
  }
  if (names.empty())
    fail("sample", "expected --classes as numbers in 0..{}, got \"{}\": this model has no class names",
         num_classes - 1, wanted);
  fail("sample", "no class is called \"{}\": the nearest are {}", wanted,
       fmt::join(nearest_names(wanted, names, 3), ", "));
}

}  // namespace

const Subjects::Subject& Subjects::operator()(int64_t image) const {
  const size_t count = chosen_.size();
  if (!are_random_) return chosen_[static_cast<size_t>(image) % count];
  const double share = philox_uniform(seed_, Draw::kSampleLabel, static_cast<uint64_t>(image));
  return chosen_[std::min(static_cast<size_t>(share * static_cast<double>(count)), count - 1)];
}

std::vector<int64_t> Subjects::numbers() const {
  std::vector<int64_t> numbers;
  for (const Subject& subject : chosen_) numbers.push_back(subject.number);
  return numbers;
}

std::string Subjects::file_name(int64_t image) const {
  constexpr size_t kLongest = 120;  // bytes of words in a name
  std::string words = (*this)(image).words;
  if (words.size() > kLongest) words.resize(text::previous_boundary(words, kLongest + 1));
  std::string name = fmt::format("{:06}", image);
  if (!words.empty()) name += '-';
  for (const unsigned char c : words)
    name += std::isalnum(c) || c == '-' || c >= 0x80 ? static_cast<char>(c) : '_';
  return name + ".png";
}

int64_t Subjects::grid_columns(int64_t num_images) const {
  const int64_t count = static_cast<int64_t>(chosen_.size());
  if (!are_random_ && count > 1 && count <= 16 && count < num_images) return count;
  return static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(num_images))));
}

std::vector<int64_t> select_classes(const std::vector<std::string>& selection,
                                    const std::vector<std::string>& class_names, int64_t num_classes) {
  if (num_classes == 0) {
    if (!selection.empty()) fail("sample", "this model has no classes: leave out --classes");
    return {0};
  }
  std::vector<int64_t> classes;
  if (selection.empty() || (selection.size() == 1 && selection[0] == "all")) {
    classes.resize(static_cast<size_t>(num_classes));
    std::iota(classes.begin(), classes.end(), 0);
    return classes;
  }
  for (const std::string& wanted : selection)
    classes.push_back(select_class(wanted, class_names, num_classes));
  return classes;
}

Subjects choose_subjects(const std::vector<std::string>& classes, const DrawingSource& source,
                         const Prompts& prompts, bool are_random, uint64_t seed) {
  std::vector<Subjects::Subject> chosen;
  for (const std::string& prompt : prompts.texts)
    chosen.push_back({static_cast<int64_t>(chosen.size()), prompt});
  if (!chosen.empty()) return {std::move(chosen), are_random, seed};
  const int64_t num_classes = source.denoiser->shape().conditioning.num_classes;
  for (const int64_t number : select_classes(classes, source.record.class_names, num_classes)) {
    const auto place = static_cast<size_t>(number);
    chosen.push_back({number, num_classes == 0                           ? ""
                              : place < source.record.class_names.size() ? source.record.class_names[place]
                                                                         : fmt::format("class-{}", number)});
  }
  return {std::move(chosen), are_random, seed};
}

}  // namespace kiln
