// What each picture of `kiln sample` shows: a class or a prompt.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "sample/prompts.h"
#include "sample/sample_source.h"

namespace kiln {

// Gives each image a class or, for models that take captions, a prompt: the chosen ones in turn, or drawn at
// random from them.
class Subjects {
 public:
  struct Subject {
    int64_t number = 0;  // the class, or the prompt's index
    std::string words{};
  };
  Subjects(std::vector<Subject> chosen, bool are_random, uint64_t seed)
      : chosen_(std::move(chosen)), are_random_(are_random), seed_(seed) {}
  const Subject& operator()(int64_t image) const;
  std::vector<int64_t> numbers() const;  // numbers of the chosen subjects
  // Returns "000012-birds.png" or "000012-a_red_fish.png".
  std::string file_name(int64_t image) const;
  // Returns the columns of a grid. Each subject gets one if there are few.
  int64_t grid_columns(int64_t num_images) const;

 private:
  std::vector<Subject> chosen_;
  bool are_random_;
  uint64_t seed_;
};

// Returns the classes of `selection`: class numbers, names (in any case), or "all"; empty means all. Names
// win over numbers. Throws Error: a number out of range, an unknown name (with the nearest ones), names for a
// model that has none.
std::vector<int64_t> select_classes(const std::vector<std::string>& selection,
                                    const std::vector<std::string>& class_names, int64_t num_classes);

// Returns the prompts as subjects, or without prompts the classes, by number or name (none: all). Throws
// Error for unknown classes.
Subjects choose_subjects(const std::vector<std::string>& classes, const DrawingSource& source,
                         const Prompts& prompts, bool are_random, uint64_t seed);

}  // namespace kiln
