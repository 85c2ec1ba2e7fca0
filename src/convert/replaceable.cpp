#include "convert/convert.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/error.h"
#include "models/model_record.h"
#include "models/weights_source.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

bool is_record(const std::string& path) {
  if (!fs::exists(path)) return false;
  const nlohmann::json document = read_json(path);
  return document.is_object() && document.contains("model") && document.contains("model_config");
}

// True for a safetensors file with a record, or a .pt file with one in FILE.json.
bool is_of_kiln(const std::string& path) {
  try {
    return tensor_file_format(path) == TensorFileFormat::kSafetensors
               ? record_of(open_safetensors(path)->metadata(), path).has_value()
               : is_record(path + ".json");
  } catch (const Error&) {
    return false;
  }
}

[[noreturn]] void refuse(const std::string& path) {
  fail("convert", "{} exists and kiln convert did not write it: choose another --out, or give --overwrite",
       path);
}

}  // namespace

void check_replaceable(const std::string& path, bool overwrite) {
  if (overwrite) return;
  if (fs::exists(path)) {
    if (!is_of_kiln(path)) refuse(path);
  } else if (fs::path(path).extension() != ".safetensors" && fs::exists(path + ".json") &&
             !is_of_kiln(path)) {
    refuse(path + ".json");
  }
}

void check_replaceable(const std::string& path, const std::string& content, bool overwrite) {
  if (overwrite || !fs::exists(path)) return;
  std::ifstream file(path, std::ios::binary);
  if (std::string(std::istreambuf_iterator<char>(file), {}) != content) refuse(path);
}

}  // namespace kiln
