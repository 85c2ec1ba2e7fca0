#include "extract/extract.h"

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "parallel/joining.h"
#include "parallel/launcher.h"

namespace kiln::cli {

void add_extract_command(CLI::App& app) {
  auto* command = app.add_subcommand("extract", "Pictures into a feature store");
  auto options = std::make_shared<ExtractOptions>();
  command
      ->add_option(
          "--data", options->data,
          "Class folders, a folder of images, one with metadata.jsonl, a WebDataset .tar or a folder of them")
      ->required();
  command
      ->add_option("--autoencoder", options->autoencoder,
                   "diffusers AutoencoderKL folder or weights file, or: pixels (none)")
      ->required();
  command->add_option("--image-size", options->image_size, "Pixels of the centre crop's side")->required();
  command->add_option("--out", options->out, "Folder of the store; an interrupted extraction continues")
      ->required();
  command->add_option("--flip", options->flip, "none | both: each picture as it is and mirrored")
      ->capture_default_str();
  command->add_flag("--enlarge", options->enlarge,
                    "Enlarge pictures smaller than --image-size, as DiT does, instead of skipping them");
  command->add_flag("--strict", options->strict,
                    "Stop at a broken or too small picture instead of skipping it");
  command->add_option("--batch", options->batch, "Pictures encoded at once (default 8, on a GPU 32)");
  command->add_option("--dtype", options->dtype, "f32 | bf16 | fp16, of the stored latents")
      ->capture_default_str();
  command->add_option("--compute-dtype", options->compute_dtype, "f32 | bf16 | fp16, of the autoencoder")
      ->capture_default_str();
  command->add_option("--device", options->device, "auto | cpu | cuda")->capture_default_str();
  command->add_option("--shard-size", options->shard_size, "Samples per file")->capture_default_str();
  command->add_option("--workers", options->workers,
                      "Decoding threads (default: half the cores, on a GPU all)");
  command->add_option("--nproc", options->nproc,
                      "Start this many ranks on this machine (0: one, or what the launcher says)");
  command->callback([options] {
    if (const int64_t num_ranks = ranks_to_launch("extract", options->nproc)) return launch_ranks(num_ranks);
    extract(*options, *join_patiently(build_identity()));
  });
}

}  // namespace kiln::cli
