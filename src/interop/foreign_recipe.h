// --recipe FILE of another trainer: the YAML configs of NVlabs/Sana and the Python configs of PixArt-alpha
// and PixArt-sigma, as options of training (docs/migrating.md).
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "run/train_options.h"

namespace kiln {

struct ForeignRecipe {
  struct Setting {
    std::string option;  // "max-grad-norm"
    nlohmann::json value;
    std::string key;              // of the file
    bool is_of_pictures = false;  // without effect on stored features
  };
  std::vector<Setting> settings;
  std::vector<std::string> notes;  // what the file says that has no option, and what to do: a line each
};

// True for names that end like such a file's: .yaml, .yml, .py.
bool is_foreign_recipe(const std::string& path);

// The options that the file is read together with: its learning rate goes with the batch of all ranks.
struct ForeignContext {
  int64_t world_size = 1;
  int64_t global_batch = 0;  // on the command line; 0: as the file says
};

// Translates the file. Keys that it leaves out have the values of its repository. Throws Error naming the
// key: it asks for what Kiln cannot do, or has a wrong type; or the line: the file is not of the format.
ForeignRecipe read_foreign_recipe(const std::string& path, const ForeignContext& context);
ForeignRecipe parse_sana_recipe(const std::string& text, const std::string& name,
                                const ForeignContext& context);
// `config`: the file with those that its _base_ names.
ForeignRecipe translate_pixart_recipe(const nlohmann::json& config, const std::string& name,
                                      const ForeignContext& context);

// Configs in Python that only assign: name = value.
//
// Parses assignments of None, booleans, numbers, strings, lists, tuples, dicts, dict(key=value) and names
// that were assigned before; comments are left out. Nothing is run. Throws Error naming `name` and the line:
// anything else, a value deeper than 16 levels, more than 1 MiB.
nlohmann::json parse_python_config(const std::string& text, const std::string& name);

// Returns what a config is on top of those that its _base_ names, as mmcv does: a dict is merged into the
// base's dict of the same key, unless it has the key _delete_.
nlohmann::json inherit_python_config(nlohmann::json base, const nlohmann::json& config);

}  // namespace kiln
