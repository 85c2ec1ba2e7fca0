#include "train/encoding/encoded_captions.h"

#include "core/error.h"
#include "core/tensors.h"
#include "extract/settings.h"

namespace kiln {

CaptionEncodingOptions text_options_of(const DataOptions& options) {
  CaptionEncodingOptions text = options.captions;
  text.encoder = options.text_encoder;
  return text;
}

int64_t captions_at_once(const TrainOptions& options) {
  if (options.data.captions.batch > 0) return options.data.captions.batch;
  return options.micro_batch > 0 ? options.micro_batch : options.global_batch;
}

std::shared_ptr<const EncodedText> open_captions(const DataOptions& options, const ImageDataset& images,
                                                 const std::string& model, const ConditioningShape& told,
                                                 at::ScalarType compute_dtype) {
  const CaptionEncodingOptions text = text_options_of(options);
  if (text.encoder.empty())
    fail("train",
         "{} takes captions, and --data {} are pictures: give --text-encoder DIR, which encodes their "
         "captions while training, or run kiln extract",
         model, options.path);
  const auto encoder =
      std::make_shared<const CaptionEncoder>(text.encoder, text.max_tokens, at::kMeta, compute_dtype,
                                             EncoderRoom(), EncoderUse::kOutline, text.instruction);
  if (told.pads_text && !encoder->shape().users_see_padding)
    fail("train",
         "{} attends to padding, but the captions of {} ({}) have none: give a folder of CLIP with "
         "--text-encoder",
         model, text.encoder, encoder->shape().family);
  return std::make_shared<const EncodedText>(encoder, images, options.path, text, text.batch,
                                             choice_name(compute_dtype));
}

std::shared_ptr<const EncodedText> load_captions(const EncodedText& captions, int64_t at_once,
                                                 at::Device device, at::ScalarType compute_dtype,
                                                 EncoderUse use) {
  const CaptionEncodingOptions& text = captions.options();
  const EncoderRoom room =
      use == EncoderUse::kEncode ? encoder_room(text, device, /*otherwise=*/{}) : EncoderRoom();
  const auto encoder = std::make_shared<const CaptionEncoder>(text.encoder, text.max_tokens, device,
                                                              compute_dtype, room, use, text.instruction);
  return std::make_shared<const EncodedText>(
      captions, encoder, encoder->batch_within_room(text.batch, at_once), choice_name(compute_dtype));
}

std::shared_ptr<const EncodedText> captions_like(const EncodedText& text, const ImageDataset& images,
                                                 const std::string& path) {
  return std::make_shared<const EncodedText>(text.encoder(), images, path, text.options(), text.batch(),
                                             text.info().compute_dtype);
}

std::vector<std::string> caption_notes(const EncodedText& text, double cut_share) {
  std::vector<std::string> notes;
  if (cut_share > 0)
    notes.push_back(fmt::format("{:.1f} % of the captions are longer than {} tokens and are cut",
                                100 * cut_share, text.info().max_tokens));
  if (text.info().num_without_caption > 0)
    notes.push_back(fmt::format("{} pictures have no caption and train as if it were dropped",
                                text.info().num_without_caption));
  return notes;
}

}  // namespace kiln
