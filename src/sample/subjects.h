// What each picture of a command shows.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "sample/prompts.h"
#include "sample/sample_source.h"

namespace kiln {

// A class or, for models that take captions, a prompt for each image: the chosen ones in turn, or drawn from
// them.
class Subjects {
 public:
  struct Subject {
    int64_t number = 0;  // the class, or the prompt's place in the list
    std::string words{};
  };
  Subjects(std::vector<Subject> chosen, bool are_random, uint64_t seed)
      : chosen_(std::move(chosen)), are_random_(are_random), seed_(seed) {}
  const Subject& operator()(int64_t image) const;
  std::vector<int64_t> numbers() const;  // of the chosen ones
  // "000012-birds.png", "000012-a_red_fish.png".
  std::string file_name(int64_t image) const;
  // Each subject gets a column of the grid where there are few.
  int64_t grid_columns(int64_t num_images) const;

 private:
  std::vector<Subject> chosen_;
  bool are_random_;
  uint64_t seed_;
};

// The prompts, or without any the classes by number or name (none: all). Throws Error for unknown classes.
Subjects choose_subjects(const std::vector<std::string>& classes, const SampleSource& source,
                         const Prompts& prompts, bool are_random, uint64_t seed);

}  // namespace kiln
