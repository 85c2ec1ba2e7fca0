#include "download/published.h"

#include "core/error.h"
#include "core/text/nearest_name.h"

namespace kiln {

const std::vector<PublishedWeights>& published_weights() {
  constexpr const char* kDitLicence = "CC BY-NC 4.0";
  constexpr const char* kSanaLicence = "NSCL v2-custom (NVIDIA; its text encoder: Gemma's terms)";
  static const std::vector<PublishedWeights> rows = {
      {.name = "DiT-XL-2-256x256",
       .licence = kDitLicence,
       .url = "https://dl.fbaipublicfiles.com/DiT/models/DiT-XL-2-256x256.pt",
       .bytes = 2'700'611'775,
       // Not published by the authors: independent public projects pin it for this address.
       .sha256 = "9ec1876e4c03471bca126663a30e2d1b20610b6d2f87850a39a36f25cc685521",
       .model = "DiT-XL/2"},
      {.name = "DiT-XL-2-512x512",
       .licence = kDitLicence,
       .url = "https://dl.fbaipublicfiles.com/DiT/models/DiT-XL-2-512x512.pt",
       .model = "DiT-XL/2"},
      {.name = "sd-vae-ft-ema",
       .licence = "MIT",
       .repository = "stabilityai/sd-vae-ft-ema",
       .files = {"config.json", "diffusion_pytorch_model.safetensors"},
       .use = "--autoencoder"},
      {.name = "sd-vae-ft-mse",
       .licence = "MIT",
       .repository = "stabilityai/sd-vae-ft-mse",
       .files = {"config.json", "diffusion_pytorch_model.safetensors"},
       .use = "--autoencoder"},
      {.name = "PixArt-Sigma-XL-2-512",
       .licence = "CreativeML Open RAIL++-M",
       .repository = "PixArt-alpha/PixArt-Sigma",
       .files = {"PixArt-Sigma-XL-2-512-MS.pth"},
       .result = "PixArt-Sigma-XL-2-512-MS.pth",
       .model = "PixArt-Sigma-XL/2-512"},
      {.name = "PixArt-Sigma-XL-2-1024",
       .licence = "CreativeML Open RAIL++-M",
       .repository = "PixArt-alpha/PixArt-Sigma",
       .files = {"PixArt-Sigma-XL-2-1024-MS.pth"},
       .result = "PixArt-Sigma-XL-2-1024-MS.pth",
       .model = "PixArt-Sigma-XL/2-1024"},
      {.name = "PixArt-Alpha-XL-2-512",
       .licence = "CreativeML Open RAIL++-M",
       .repository = "PixArt-alpha/PixArt-alpha",
       .files = {"PixArt-XL-2-512x512.pth"},
       .result = "PixArt-XL-2-512x512.pth",
       .model = "PixArt-Alpha-XL/2-512"},
      {.name = "Sana-600M-512",
       .licence = kSanaLicence,
       .repository = "Efficient-Large-Model/Sana_600M_512px_diffusers",
       .files = {"transformer/", "vae/"},
       .result = "transformer",
       .model = "Sana-600M-512"},
      {.name = "Sana-1600M-1024",
       .licence = kSanaLicence,
       .repository = "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
       .files = {"transformer/", "vae/"},
       .result = "transformer",
       .model = "Sana-1600M"},
      {.name = "t5-v1_1-xxl",
       .licence = "Apache 2.0",
       .repository = "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
       .files = {"text_encoder/", "tokenizer/spiece.model", "tokenizer/tokenizer_config.json",
                 "tokenizer/special_tokens_map.json"},
       .use = "--text-encoder"},
      {.name = "gemma-2-2b-it",
       .licence = "Gemma's terms of use",
       .repository = "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
       .files = {"text_encoder/", "tokenizer/tokenizer.model", "tokenizer/tokenizer_config.json",
                 "tokenizer/special_tokens_map.json"},
       .use = "--text-encoder"},
      {.name = "clip-vit-large-patch14",
       .licence = "CreativeML Open RAIL-M",
       .repository = "stable-diffusion-v1-5/stable-diffusion-v1-5",
       .files = {"text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/vocab.json",
                 "tokenizer/merges.txt", "tokenizer/tokenizer_config.json",
                 "tokenizer/special_tokens_map.json"},
       .use = "--text-encoder"},
      {.name = "all-MiniLM-L6-v2",
       .licence = "Apache 2.0",
       .repository = "sentence-transformers/all-MiniLM-L6-v2",
       .files = {"config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json",
                 "special_tokens_map.json", "sentence_bert_config.json"},
       .use = "--text-encoder"},
      {.name = "inception-2015-12-05",
       .licence = "Apache 2.0",
       .url = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
              "pt_inception-2015-12-05-6726825d.pth",
       .use = "kiln evaluate --net inception --net-weights"},
      {.name = "adm-imagenet-256",
       .licence = "of ImageNet's pictures",
       .url = "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet/256/"
              "VIRTUAL_imagenet256_labeled.npz",
       .use = "kiln evaluate --reference"},
      {.name = "adm-imagenet-512",
       .licence = "of ImageNet's pictures",
       .url = "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet/512/"
              "VIRTUAL_imagenet512.npz",
       .use = "kiln evaluate --reference"},
  };
  return rows;
}

const PublishedWeights& find_published_weights(const std::string& name) {
  std::vector<std::string> names;
  for (const PublishedWeights& row : published_weights()) {
    if (row.name == name) return row;
    names.emplace_back(row.name);
  }
  fail("download", "unknown weights \"{}\", the nearest is {}; kiln download --list names all", name,
       nearest_name(name, names));
}

namespace {

const std::vector<PublishedModel>& published_models() {
  // The eight classes of DiT's own sample.py.
  static const std::vector<std::string> kClassic = {"207", "360", "387", "974", "88", "979", "417", "279"};
  static const std::vector<PublishedModel> models = {
      {"DiT-XL/2-256", "DiT-XL-2-256x256", "sd-vae-ft-mse", "DiT-XL/2", 256, kClassic},
      {"DiT-XL/2-512", "DiT-XL-2-512x512", "sd-vae-ft-mse", "DiT-XL/2", 512, kClassic}};
  return models;
}

}  // namespace

const PublishedModel* find_published_model(const std::string& name) {
  for (const PublishedModel& model : published_models())
    if (name == model.name || name == model.weights) return &model;
  return nullptr;
}

void refuse_without_weights(const std::string& name) {
  for (const PublishedWeights& row : published_weights()) {
    if (row.name != name) continue;
    if (!row.model)
      fail("sample", "{0} is no denoiser: use it in {1} $(kiln download {0}), and give --run or --weights",
           name, row.use);
    fail("sample",
         "{} are weights alone: kiln sample --weights $(kiln download {}) --model {} --autoencoder FOLDER "
         "--text-encoder FOLDER --prompt TEXT",
         name, name, row.model);
  }
  std::string names;
  for (const PublishedModel& model : published_models())
    names += (names.empty() ? "" : ", ") + std::string(model.name);
  fail("sample", "--model {} needs --weights FILE; those of {} are fetched", name, names);
}

}  // namespace kiln
