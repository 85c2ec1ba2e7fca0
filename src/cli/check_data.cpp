#include "extract/check_data.h"
#include "core/files/atomic_file.h"
#include "core/json_config.h"
#include "core/text/printable.h"

#include "cli/commands.h"
#include "cli/extract_options.h"

namespace kiln::cli {

namespace {

struct CheckArguments {
  CheckOptions options;
  std::string html;
  bool json = false;
};

void run_check(CheckArguments arguments) {
  CheckOptions& options = arguments.options;
  std::string& instruction = options.extract.text.instruction;
  instruction = read_text_option("check-data", "--caption-instruction", instruction);
  const CheckedData data = check_data(options);
  for (const std::string& note : data.dataset->notes()) fmt::print(stderr, "note: {}\n", printable(note));
  fmt::print("{}", arguments.json ? to_json(data).dump(1) + "\n" : to_text(data, options));
  if (!arguments.html.empty()) write_file_atomically("check-data", arguments.html, to_html(data, options));
  if (options.move_to.empty()) return;
  const int64_t num_moved = move_found(data, options);
  fmt::print(stderr, "moved {} pictures to {}\n", num_moved, options.move_to);
}

}  // namespace

void add_check_data_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "check-data",
      "Look for what extraction would leave out or training would suffer from; encodes nothing");
  auto arguments = std::make_shared<CheckArguments>();
  CheckOptions& options = arguments->options;
  options.extract.image_size = 256;
  command->add_option("data", options.extract.data, "Pictures, as kiln extract --data takes them")
      ->required();
  add_size_options(*command, options.extract);
  command->get_option("--image-size")->capture_default_str();
  command->add_option(
      "--text-encoder", options.extract.text.encoder,
      "Folder of a text encoder with its tokenizer, or of a pipeline: say which captions it cuts");
  command->add_option("--text-max-tokens", options.extract.text.max_tokens,
                      "Tokens at which captions are cut (default: depends on the encoder)");
  add_caption_options(*command, options.extract.text);
  command
      ->add_option("--similar-bits", options.similar_bits,
                   "Bits of 64 in which the hashes of pictures that look alike may differ, 0 to 7")
      ->capture_default_str();
  command
      ->add_option("--blurred-below", options.blurred_below,
                   "Sharpness below which a picture is blurred: the variance of the Laplacian at 512 pixels")
      ->capture_default_str();
  command->add_option("--html", arguments->html, "Write a page with pictures of each finding to this file");
  command->add_flag("--json", arguments->json, "Print one JSON object, which lists every finding");
  command->add_option("--move-to", options.move_to,
                      "Move the pictures of the findings of --move, with their captions, to this folder");
  command
      ->add_option("--move", options.moved,
                   "Findings whose pictures are moved: broken, small, copy, similar, blurred, extension, "
                   "colors, no-caption or cut-caption, several with commas")
      ->capture_default_str();
  command->add_option("--workers", options.extract.workers, "Threads (default: all cores)");
  command->callback([arguments] { run_check(*arguments); });
}

}  // namespace kiln::cli
