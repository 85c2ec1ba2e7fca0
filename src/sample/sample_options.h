// `kiln sample`: its options, and how it draws pictures from a trained model.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"

namespace kiln {

struct SampleCommand {
  std::string run;      // run folder; "" = `weights` are given
  std::string weights;  // a weights file, a diffusers folder, a run or a checkpoint
  // Override what the weights say of themselves: the model's name, JSON (text or file) of its config, the
  // objective, its shift, and the side of the model's pictures. "", absent and 0 = as they say.
  std::string model, model_config, objective;
  std::optional<double> flow_shift{};
  int64_t image_size = 0;   // pixels
  std::string base;         // of a run that trained an adapter; "" = where it was
  std::string adapter;      // LoRA to add to the weights: PEFT's, diffusers', kohya's or a run's; "" = none
  bool anyway = false;      // draw with pieces other than those that the weights were trained with
  std::string noise;        // file of the noise that pictures start from; "" = drawn by the seed
  std::string save_noise;   // file to write that noise into; "" = none
  std::string autoencoder;  // path or "pixels"; "" = as the weights say
  std::string tiles = "auto";       // large pictures are decoded in tiles: auto | off | side in pixels
  std::optional<double> ema_decay;  // which EMA of a run; absent = the first
  bool no_ema = false;
  bool random_labels = false;  // classes drawn at random, by (seed, image)

  int64_t num_images = 8;
  std::vector<std::string> classes;  // empty = all in turn
  std::vector<std::string> prompts;  // for models that take captions, drawn in turn
  std::string prompts_file;          // one prompt a line
  std::string negative_prompt;       // "" = what the model was trained with for dropped captions
  std::string text_encoder;          // its folder; "" = as the weights say
  int64_t height = 0, width = 0;     // of the pictures in pixels; 0 = the model's own
  std::string aspect_ratio{};        // such as "16:9"; "" = by height and width
  std::string image{};               // file of the picture that all start from; "": they start from noise
  std::optional<double> strength{};  // how far from that picture, 0 to 1; absent = 0.8
  std::string guidance_interval;     // "LO:HI" as shares of the schedule, 0 clean, 1 noise; "" = everywhere
  std::optional<double> cfg_scale;   // absent = as the weights say, else as published
  std::string cfg_convention = "auto";  // auto | dit | plain
  std::string sampler;                  // "" = as the weights say, else as published
  int64_t num_sampling_steps = 0;       // 0 = likewise, or usual for the sampler
  uint64_t seed = 0;

  std::string out, npz;
  bool grid = false, no_png = false;
  bool tf32 = false;  // CUDA: f32 products in TF32
  int64_t batch = 8;
  std::string device = "auto", compute_dtype = "f32";
  std::string cuda_graph = "auto";  // auto | off: passes of one shape replayed as a graph, on CUDA
  int64_t threads = 0;              // 0 = all cores, divided among the ranks of a machine
  int64_t nproc = 0;                // ranks that this process starts on this machine; 0 = none
};

// Draws the images that are missing and shows progress on stderr. Several ranks take batches in turn. Each
// writes its images as PNG files, from which the first makes the .npz. Throws Error.
void run_sample_command(const SampleCommand& command, ProcessGroup& group);

}  // namespace kiln
