#include "models/model_record.h"

#include <filesystem>

#include "checkpoint/train_state.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/text/json_text.h"
#include "core/text/some_of.h"
#include "core/text/utf8.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string info_path(const std::string& run) {
  return (std::filesystem::path(run) / "config.json").string();
}

}  // namespace

bool is_run_folder(const std::string& path) {
  std::error_code unreachable;
  return std::filesystem::is_directory(std::filesystem::path(path) / "checkpoints", unreachable) &&
         std::filesystem::exists(info_path(path), unreachable);
}

void write_run_info(const std::string& run, const ModelRecord& info) {
  // Class names may be folder names: bytes that are not UTF-8 become the replacement character, as in stores.
  write_file_atomically("run", info_path(run), dump_utf8(to_json(info), 2) + "\n");
}

ModelRecord read_run_info(const std::string& run) {
  const std::string path = info_path(run);
  if (!std::filesystem::exists(path))
    fail("run", "cannot read {}: {} is not the folder of a training run", path, run);
  const json document = read_json_file("run", path);
  try {
    for (const char* key : {"model", "model_config", "objective"})
      if (!document.contains(key)) fail("run", "{} is not a run's config: it has no {}", path, key);
    return parse_model_record(document, path);
  } catch (const json::exception& error) {
    fail("run", "{} is not a run's config: {}", path, message_of(error));
  }
}

std::string weights_file_name(const std::string& run, const ModelRecord& info, bool use_ema,
                              std::optional<double> decay) {
  if (!use_ema || (info.ema_decays.empty() && !decay)) return kModelFile;
  for (size_t i = 0; i < info.ema_decays.size(); ++i)
    if (!decay || *decay == info.ema_decays[i]) return ema_file_name(info.ema_decays, i);
  fail("run", "{} has no EMA of decay {}: its decays are {}", run, *decay, some_of(info.ema_decays));
}

}  // namespace kiln
