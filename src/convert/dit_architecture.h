// Which DiT a weights file holds, told by its keys and shapes. Torch-free.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "models/denoisers/dit.h"

namespace kiln {

using ShapeMap = std::map<std::string, std::vector<int64_t>>;

// What shapes alone cannot tell.
struct DitHints {
  std::optional<int64_t> input_size{};  // for a file without pos_embed; else 32
  std::optional<int64_t> num_heads{};   // else hidden_size / 64 (XL: 16)
  bool has_null_class = true;  // the label table ends with the null class, as in every published checkpoint
};

// From RUN/config.json; null gives the defaults. Throws Error naming a value of a wrong type.
DitHints dit_hints(const nlohmann::json& run);

// DiT's published keys -> the config, or nullopt for anything else. The label table is taken to end with the
// null class, as in every published checkpoint. Throws Error when the keys are DiT's but the shapes do not
// fit together.
std::optional<DitConfig> recognise_dit(const ShapeMap& shapes, const DitHints& hints = {});

// "DiT-XL/2" where depth, widths and patch are those of a published name, else "dit".
std::string dit_name(const DitConfig& config);

}  // namespace kiln
