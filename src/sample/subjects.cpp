#include "sample/subjects.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "core/philox.h"
#include "sample/class_selection.h"
#include "text/tokenizers/unicode.h"

namespace kiln {

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

Subjects choose_subjects(const std::vector<std::string>& classes, const SampleSource& source,
                         const Prompts& prompts, bool are_random, uint64_t seed) {
  std::vector<Subjects::Subject> chosen;
  for (const std::string& prompt : prompts.texts)
    chosen.push_back({static_cast<int64_t>(chosen.size()), prompt});
  if (!chosen.empty()) return {std::move(chosen), are_random, seed};
  const int64_t num_classes = source.denoiser->shape().conditioning.num_classes;
  for (const int64_t number : select_classes(classes, source.class_names, num_classes)) {
    const auto place = static_cast<size_t>(number);
    chosen.push_back({number, num_classes == 0                    ? ""
                              : place < source.class_names.size() ? source.class_names[place]
                                                                  : fmt::format("class-{}", number)});
  }
  return {std::move(chosen), are_random, seed};
}

}  // namespace kiln
