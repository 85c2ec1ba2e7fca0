// The algorithms that cuBLASLt's products take in a run with --untried-gpu products, kept in its folder: a
// run that resumes takes the same ones, and so gives the same bits.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/json.h"
#include "ops/kernel_args.h"

namespace kiln {

// A choice, with the kind of GPU and the version of cuBLASLt that it holds for.
struct KeptChoice {
  std::string gpu;
  int64_t cublaslt = 0;
  ops::ProductChoice choice{};
};
nlohmann::json to_json(const std::vector<KeptChoice>& choices);
// Throws Error naming `file` and the key that is missing or wrong.
std::vector<KeptChoice> kept_choices(const std::string& file, const nlohmann::json& json);

class ProductChoices {
 public:
  // Takes what this rank has kept in the run folder for this GPU, and times the other shapes when they come.
  // Each rank has a file of its own, since each times for itself. Throws Error: the file is damaged.
  ProductChoices(const std::string& folder, int64_t rank, at::Device device);
  ~ProductChoices();
  ProductChoices(const ProductChoices&) = delete;

  // Writes choices that came since the last call, if there are any. Call it after each step; those of
  // validation and grids come with the next one, or at the end.
  void keep();

 private:
  std::string path_, gpu_;
  std::vector<KeptChoice> of_others_;  // of other GPUs and versions, on which the run may go on later
  size_t num_kept_ = 0;
};

}  // namespace kiln
