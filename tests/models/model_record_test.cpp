// The record of a model's weights: its JSON, and the metadata of files that carries it.
#include "models/model_record.h"

#include "models/model.h"
#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

// Every part has another value than the default.
ModelRecord full_record() {
  return {.model = "PixArt-Sigma-XL/2-512",
          .model_config = {{"depth", 2}},
          .objective = {{"type", "flow"}, {"shift", 4.0}},
          .drawing = {.sampler = "flow_euler",
                      .num_sampling_steps = 7,
                      .cfg_scale = 2.5,
                      .guided_channels = "all",
                      .unconditional = "null_rows"},
          .null_rows = "empty_caption",
          .image_size = 64,
          .buckets = {{.height = 48, .width = 80}, {.height = 80, .width = 48}},
          .autoencoder = {.name = "autoencoder_kl",
                          .path = "/disk/vae",
                          .fingerprint = "xxh3:1",
                          .scaling_factor = 0.13,
                          .shift_factor = 0.5,
                          .downsample = 8},
          .text = {.encoder = "t5_encoder",
                   .encoder_path = "/disk/t5",
                   .encoder_fingerprint = "xxh3:2",
                   .tokenizer_fingerprint = "xxh3:3",
                   .max_tokens = 16,
                   .prefix = "a ",
                   .suffix = ".",
                   .instruction = "draw",
                   .dtype = Dtype::kBF16},
          .adapter = {.config = {{"r", 8}},
                      .base_path = "/disk/base",
                      .base_fingerprint = "4",
                      .base_values = "xxh3:5"},
          .class_names = {"cat", "dog"},
          .ema_decays = {0.9999, 0.99},
          .average = "ema-0.9999",
          .trained_on = {{"data", {"birds"}}, {"steps", 10}}};
}

TEST(ModelRecord, ReadsWhatWasWritten) {
  const json written = to_json(full_record());
  EXPECT_EQ(to_json(parse_model_record(written, "here")), written);
}

TEST(ModelRecord, PartsThatAnEarlierVersionDidNotWriteAreNotKnown) {
  const ModelRecord record = parse_model_record(
      {{"model", "DiT-S/2"}, {"model_config", json::object()}, {"objective", {{"type", "iddpm"}}}}, "here");
  EXPECT_EQ(record.drawing.sampler, "");
  EXPECT_EQ(record.drawing.unconditional, "");
  EXPECT_EQ(record.autoencoder.name, "");
  EXPECT_EQ(record.text.encoder, "");
  EXPECT_TRUE(record.adapter.config.is_null());
}

TEST(ModelRecord, AnUnknownAutoencoderHasNoScale) {
  const json written = to_json({.autoencoder = {.name = ""}});
  EXPECT_FALSE(written["autoencoder"].contains("scaling_factor"));
  EXPECT_FALSE(written["autoencoder"].contains("shift_factor"));
}

TEST(ModelRecord, WhatIsDrawnHasTheRecordedSizeWhereTheModelTakesIt) {
  DenoiserShape any, square;
  any.input_size = square.input_size = 64;
  any.size_multiple = 2;
  ModelRecord record = {.image_size = 64, .autoencoder = {.downsample = 8}};
  EXPECT_EQ(drawn_side(record, any, 8), 8);
  EXPECT_EQ(drawn_side(record, any, 4), 8);  // the record knows better
  EXPECT_EQ(drawn_side(record, square, 8), 64);
  record.image_size = 72;  // not a whole number of patches
  EXPECT_EQ(drawn_side(record, any, 8), 64);
  record.image_size = 0;
  EXPECT_EQ(drawn_side(record, any, 8), 64);
}

TEST(ModelRecord, WrongKindsAreNamedWithTheirPlace) {
  EXPECT_ERROR(parse_model_record({{"image_size", "big"}}, "X.json"), "image_size", "(X.json)");
  EXPECT_ERROR(parse_model_record({{"drawing", {{"sampler", 3}}}}, "X.json"), "sampler",
               "(drawing of X.json)");
  EXPECT_ERROR(parse_model_record({{"model_config", 3}}, "X.json"), "model_config");
  EXPECT_ERROR(parse_model_record(json::array(), "X.json"), "(X.json)");
}

TEST(ModelRecord, FilesThatTravelHoldItWithoutPathsOfThisMachine) {
  const auto metadata = metadata_of(full_record());
  EXPECT_EQ(metadata, metadata_of(full_record()));
  for (const auto& [key, value] : metadata) EXPECT_THAT(value, Not(HasSubstr("/disk"))) << key;
  const ModelRecord read = *record_of(metadata, "file");
  EXPECT_EQ(read.autoencoder.path, "vae");
  EXPECT_EQ(read.text.encoder_path, "t5");
  EXPECT_EQ(read.objective, full_record().objective);
  EXPECT_EQ(read.average, "ema-0.9999");
  EXPECT_TRUE(read.ema_decays.empty());
  EXPECT_EQ(metadata.at("modelspec.sai_model_spec"), "1.0.1");
  EXPECT_EQ(metadata.at("modelspec.architecture"), "pixart-sigma-xl-2-512");
  EXPECT_EQ(metadata.at("modelspec.resolution"), "64x64");
  EXPECT_EQ(metadata.at("modelspec.prediction_type"), "flow");
}

TEST(ModelRecord, NewUser13FilesCallAPieceByTheNearestTellingName) {
  for (const auto& [path, name] : std::vector<std::pair<std::string, std::string>>{
           {"", ""},
           {"/disk/t5", "t5"},
           {"/disk/t5/", "t5"},
           {"/disk/vae.safetensors", "vae.safetensors"},
           {"/python/site-packages/minilm_package/model", "minilm_package/model"},
           {"/python/site-packages/minilm_package/model/", "minilm_package/model"},
           {"/hub/models--org--all-MiniLM-L6-v2/snapshots/0123456789abcdef0123456789abcdef01234567",
            "all-MiniLM-L6-v2"},
           {"/hub/models--org--pixart/snapshots/0123456789abcdef0123456789abcdef01234567/text_encoder",
            "text_encoder"},
           {"/disk/t5/0123456789abcdef", "t5/0123456789abcdef"},
           {"/home/ada/model", "model"},
           {"/model", "model"},
           {"model", "model"}}) {
    EXPECT_EQ(piece_name(path), name);
    EXPECT_EQ(piece_name(name), name) << "a name stays as it is from file to file";
  }
  ModelRecord record = full_record();
  record.text.encoder_path = "/python/site-packages/minilm_package/model";
  EXPECT_EQ(record_of(metadata_of(record), "file")->text.encoder_path, "minilm_package/model");
}

TEST(ModelRecord, FilesOfEarlierVersionsHoldTheConfigAlone) {
  const ModelRecord record = *record_of({{"kiln_model_config", R"({"num_heads": 4})"}}, "file");
  EXPECT_EQ(record.model, "");
  EXPECT_EQ(record.model_config, json({{"num_heads", 4}}));
  EXPECT_FALSE(record_of({{"format", "pt"}}, "file"));
  EXPECT_ERROR(record_of({{"kiln_record", "[]"}}, "file"), "kiln_record");
}

}  // namespace
}  // namespace kiln
