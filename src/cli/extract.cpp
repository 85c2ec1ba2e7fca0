#include "extract/extract.h"
#include "core/command_line.h"
#include "core/json_config.h"

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/extract_options.h"
#include "parallel/ranks/agreement.h"
#include "parallel/ranks/rendezvous.h"

namespace kiln::cli {

namespace {

void add_text_options(CLI::App& command, CaptionEncodingOptions& text) {
  command.add_option("--text-encoder", text.encoder,
                     "Also encode the captions: folder of a T5, BERT, CLIP or Gemma 2 encoder with its "
                     "tokenizer, or of a pipeline");
  command.add_option("--text-name", text.name,
                     "Name of the text store OUT/text-NAME (default: the encoder's kind)");
  command.add_option("--text-dtype", text.dtype,
                     "Precision of the stored features, f32 | bf16 | fp16 (default: fp16, for Gemma bf16)");
  command.add_option(
      "--text-max-tokens", text.max_tokens,
      "Cut captions to this many tokens (default: depends on the encoder, 300 for T5 and Gemma)");
  command.add_option("--text-batch", text.batch, "Captions encoded at once (default 32, on a GPU 256)");
  command.add_option(
      "--text-encoder-memory", text.memory,
      "Device memory that encoding captions may take, on a CPU the memory of the whole process (3G; default: "
      "what is free); an encoder that does not fit is read segment by segment while it computes");
  add_caption_options(command, text);
}

}  // namespace

void add_size_options(CLI::App& command, ExtractOptions& options) {
  command.add_option("--image-size", options.image_size,
                     "Side of the centre crop in pixels, or base of --buckets pixart");
  command.add_option("--buckets", options.buckets,
                     "Bring pictures to the bucket with the nearest aspect ratio: pixart (the published "
                     "table of --image-size 256, 512, 1024, 2048 or 2880) or sizes HxW,HxW,...");
  command
      .add_option("--bucket-min", options.bucket_min,
                  "Merge buckets of fewer pictures into the nearest other one")
      ->capture_default_str();
  command
      .add_option("--exif-orientation", options.exif_orientation,
                  "apply: turn pictures as their EXIF tag says; ignore: take them as stored")
      ->capture_default_str();
  command.add_flag(
      "--enlarge", options.enlarge,
      "Enlarge images smaller than --image-size or their bucket, as DiT and PixArt do, instead of "
      "skipping them");
}

void add_caption_options(CLI::App& command, CaptionOptions& captions) {
  command
      .add_option("--captions", captions.sources,
                  "Where captions come from: data (metadata.jsonl, .txt, .json, data_info.json) | png-text | "
                  "file-names, or several with commas")
      ->capture_default_str();
  command.add_option("--caption-prefix", captions.prefix, "Text before every caption");
  command.add_option("--caption-suffix", captions.suffix, "Text after every caption");
  command.add_option(
      "--caption-instruction", captions.instruction,
      "Text or file; Gemma sees it before every caption, and its own rows are not kept, as in Sana");
}

void add_extract_command(CLI::App& app) {
  auto* command = app.add_subcommand("extract", "Make a feature store from images");
  auto options = std::make_shared<ExtractOptions>();
  command
      ->add_option("--data", options->data,
                   "Class folders, a folder of images, one with metadata.jsonl or data_info.json, a "
                   "WebDataset .tar or a folder of them")
      ->required();
  command->add_option("--autoencoder", options->autoencoder,
                      "diffusers AutoencoderKL folder or weights file, or: pixels (none); without this "
                      "option, text is added to the store at --out");
  add_size_options(*command, *options);
  command->add_option("--out", options->out, "Folder of the store; an interrupted extraction continues")
      ->required();
  command->add_option("--flip", options->flip, "both: store each image as it is and mirrored; none: as it is")
      ->capture_default_str();
  command->add_flag(
      "--append", options->append,
      "Add the pictures of --data that the store at --out lacks, or, without --autoencoder, the captions of "
      "the pictures that were added last; runs under way keep the samples they have");
  command->add_flag("--strict", options->strict,
                    "Stop at a broken or too small image instead of skipping it");
  command->add_option("--batch", options->batch, "Images encoded at once (default: 8; on a GPU 32)");
  command->add_option("--dtype", options->dtype, "Precision of the stored latents: f32, bf16 or fp16")
      ->capture_default_str();
  command
      ->add_option("--compute-dtype", options->compute_dtype,
                   "Precision of the autoencoder: f32, bf16 or fp16")
      ->capture_default_str();
  command
      ->add_option("--tiles", options->tiles,
                   "Encode pictures larger than this many pixels a side in tiles of that side, with blended "
                   "seams: off, a side, or auto (512 if there is no memory for the whole picture)")
      ->capture_default_str();
  command->add_flag("--tf32", options->tf32, "CUDA: compute f32 products in TF32");
  command->add_option("--device", options->device, "Device: auto, cpu or cuda")->capture_default_str();
  command->add_option("--shard-size", options->shard_size, "Samples per file")->capture_default_str();
  command->add_option("--workers", options->workers,
                      "Decoding threads (default: half the cores; all on a GPU and for pixels)");
  command->add_option("--threads", options->threads, "Compute threads (0: all cores)")->capture_default_str();
  command->add_option("--nproc", options->nproc,
                      "Start this many ranks on this machine (0: one, or what the launcher says)");
  add_text_options(*command, options->text);
  show_first(*command, {"--data", "--autoencoder", "--image-size", "--buckets", "--out", "--flip",
                        "--enlarge", "--append", "--strict", "--compute-dtype", "--device", "--nproc",
                        "--text-encoder", "--text-name", "--captions"});
  command->callback([options] {
    if (const int64_t num_ranks = ranks_to_launch("extract", options->nproc)) return launch_ranks(num_ranks);
    std::string& instruction = options->text.instruction;
    instruction = read_text_option("extract", "--caption-instruction", instruction);
    extract(*options, *join_patiently(build_identity()));
  });
}

}  // namespace kiln::cli
