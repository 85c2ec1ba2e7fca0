// The record of a model's weights: what must be known to draw with them what they were trained to draw. A run
// writes it (RUN/config.json), safetensors files carry it in their metadata, and every export passes it on.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/json.h"

namespace kiln {

struct DenoiserShape;

// What is not known has the value of an empty object, name or list, or null.
struct ModelRecord {
  std::string model{};  // name in the registry; "" only in files of other programs
  nlohmann::json model_config = nlohmann::json::object();
  nlohmann::json objective{};  // make_objective's config

  // How pictures are drawn unless the user says otherwise.
  struct DrawingInfo {
    std::string sampler{};  // one of sampler_names(); "" = the other three are not known either
    int64_t num_sampling_steps = 0;
    double cfg_scale = 1;
    std::string guided_channels{};  // "model": those that the model's authors guide; "all"
    // What guidance moves away from: "null_rows" of the weights with the prompt's mask, "empty_caption" with
    // its own mask, "null_class", or "none". It is known without the sampler too.
    std::string unconditional{};
  } drawing{};
  // What the null rows of the weights are: "empty_caption": the encoder's rows of "", the last one repeated;
  // "trained".
  std::string null_rows{};

  int64_t image_size = 0;  // pixels, of what is drawn; the model's config may refer to another size
  struct PictureSize {
    int64_t height = 0, width = 0;
  };
  std::vector<PictureSize> buckets{};  // in pixels; empty: all pictures were squares of image_size

  // The autoencoder that made the latents. `path` may be empty: a feature store may not know where its
  // autoencoder is. In exported files it is its piece_name(), whose last part is looked up beside the file.
  struct AutoencoderInfo {
    std::string name = "pixels";  // "pixels" | "autoencoder_kl" | ...; "" = not known
    std::string path{}, fingerprint{};
    double scaling_factor = 1, shift_factor = 0;  // without meaning where the name is not known
    int64_t downsample = 0;                       // pixels of a latent's side; 0: not known
  } autoencoder{};
  // The encoder of the captions. An empty `encoder`: there are no captions, or it is not known.
  struct TextInfo {
    std::string encoder{}, encoder_path{}, encoder_fingerprint{}, tokenizer_fingerprint{};
    int64_t max_tokens = 0;
    std::string prefix{}, suffix{};  // around every caption
    std::string instruction{};       // the encoder saw it before every caption; it has no rows
    Dtype dtype = Dtype::kF32;       // of the features in training
  } text{};
  // The adapter that a run trained; its checkpoints contain nothing else. An empty `config`: the run trained
  // the model itself.
  struct AdapterInfo {
    nlohmann::json config{};  // PEFT's adapter_config.json
    std::string base_path{};
    std::string base_fingerprint{};  // of its file's keys and bytes
    std::string base_values{};  // fingerprint_of_values(), the same whatever the base's keys and precision
  } adapter{};

  std::vector<std::string> class_names{};  // empty: classes have numbers only
  std::vector<double> ema_decays{};        // of a run: for ema.safetensors, then for ema-<decay>.safetensors
  std::string average{};                   // of a file: "model" | "ema-0.9999"
  // What the weights have seen: {"data": names, "samples", "global_batch", "steps"}, as far as it is known.
  // In a run of several stages this is the last one, from its "first_step", and "earlier" has the same of
  // those before it. "adapters": the names of those that were merged, the last one last.
  nlohmann::json trained_on = nlohmann::json::object();
};

// The only places that know the JSON form, which is also RUN/config.json's. Class names with bytes that are
// not UTF-8 are kept: write it with dump_utf8(). Absent parts stay unknown. The second throws Error
// naming `source` and the key that is of the wrong kind.
nlohmann::json to_json(const ModelRecord& record);
ModelRecord parse_model_record(const nlohmann::json& document, const std::string& source);

// Returns the side in latents of the pictures that weights of this record and shape draw by themselves: that
// of the recorded size where the model takes it, else the one that it was built for. `downsample`: pixels of
// a latent's side, for records that do not know it.
int64_t drawn_side(const ModelRecord& record, const DenoiserShape& shape, int64_t downsample);

// Returns what to call a piece of a model that lies at `path`: its file's or folder's own name. Folders
// called "model" or by a hash tell nobody which piece it is: "minilm_package/model" has the one around it,
// and "all-MiniLM-L6-v2" is the repository of a snapshot in the hub's cache. Of such a name the name is the
// same.
std::string piece_name(const std::string& path);

// The metadata key of a safetensors file that holds the record, as JSON.
inline constexpr const char* kRecordKey = "kiln_record";
// Returns the metadata of a file of these weights: the record, in which paths are names, beside
// modelspec's keys. The same record gives the same text.
std::map<std::string, std::string> metadata_of(const ModelRecord& record);
// Returns the record in a file's metadata, or in that of earlier versions, which held the model's config
// alone. Nothing if there is neither. Throws Error naming `source`.
std::optional<ModelRecord> record_of(const std::map<std::string, std::string>& metadata,
                                     const std::string& source);

// The folder of a training run, for readers of its weights: RUN/config.json, which is their record, and the
// choice among its checkpoints' files.
//
// True for the folder of a training run: it has a config.json and a folder of checkpoints.
bool is_run_folder(const std::string& path);

// Writes RUN/config.json atomically. Throws Error.
void write_run_info(const std::string& run, const ModelRecord& info);
// Reads RUN/config.json. Throws Error naming the file and the key that is missing or of the wrong kind.
ModelRecord read_run_info(const std::string& run);

// Returns the name of the file in a checkpoint of the run: of the EMA of `decay` (absent: the run's first),
// or of the model itself if `use_ema` is false or the run has no EMA. Throws Error: no such decay.
std::string weights_file_name(const std::string& run, const ModelRecord& info, bool use_ema,
                              std::optional<double> decay);

}  // namespace kiln
