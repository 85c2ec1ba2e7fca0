#include "cli/commands.h"
#include "core/error.h"
#include "data/store/store_import.h"
#include "data/store/store_report.h"
#include "extract/extract.h"

namespace kiln::cli {

namespace {

void add_import(CLI::App& store) {
  auto* command = store.add_subcommand("import", "Make a store from the feature cache of another trainer");
  auto options = std::make_shared<StoreImportOptions>();
  command
      ->add_option("--from", options->from,
                   "Format of the cache: fast-dit (N.npy and labels, scaled) | pixart (*.npy of mean and "
                   "standard deviation)")
      ->capture_default_str();
  command->add_option("features", options->features, "Folder of .npy files")->required();
  command->add_option("labels", options->labels, "fast-dit: folder of labels");
  command->add_option("--data-info", options->data_info,
                      "pixart: data_info.json, for the pictures' sizes and prompts");
  auto captions = std::make_shared<PixartCaptionOptions>();
  command->add_option("--caption-features", captions->features,
                      "pixart: folder of caption features (*.npz), which become a text store");
  command->add_option("--text-encoder", captions->text_encoder,
                      "pixart: folder of the encoder that made the caption features, for the empty caption "
                      "and to check prompts");
  command->add_option("--text-name", captions->name, "pixart: name of the text store")->capture_default_str();
  command->add_option("--out", options->out, "Folder of the store; rerunning continues")->required();
  command
      ->add_option("--image-size", options->image_size,
                   "Side of the encoded images in pixels; for several shapes, the base of their table")
      ->required();
  command->add_option("--scaling-factor", options->scaling_factor,
                      "Scaling factor of the autoencoder (fast-dit: 0.18215; pixart needs it)");
  command->add_option("--num-classes", options->num_classes,
                      "Number of classes (default: the largest label + 1)");
  command->add_option("--dtype", options->dtype, "Precision of the stored latents: f32, bf16 or fp16")
      ->capture_default_str();
  command->callback([options, captions] {
    const bool has_captions = !captions->features.empty();
    if (has_captions && (options->from != "pixart" || options->data_info.empty()))
      fail("store import",
           "--caption-features needs --from pixart and the prompts: give --data-info data_info.json");
    import_store(*options);
    captions->data_info = options->data_info;
    if (has_captions) import_pixart_captions(options->out, *captions);
  });
}

}  // namespace

void add_store_command(CLI::App& app) {
  auto* command = app.add_subcommand("store", "Import, inspect and verify feature stores");
  command->require_subcommand(1);
  add_import(*command);

  auto folder = std::make_shared<std::string>();
  auto max_samples = std::make_shared<int64_t>(4096);
  auto* inspect =
      command->add_subcommand("inspect", "Show what a store holds, with statistics of its latents");
  inspect->add_option("store", *folder, "Folder of the store")->required();
  inspect->add_option("--max-samples", *max_samples, "Largest number of samples to take statistics of")
      ->capture_default_str();
  inspect->callback([=] { inspect_store(*folder, *max_samples, stdout); });

  auto* verify = command->add_subcommand("verify", "Check every checksum, shape and value");
  verify->add_option("store", *folder, "Folder of the store")->required();
  verify->callback([=] { verify_store(*folder, stdout); });
}

}  // namespace kiln::cli
