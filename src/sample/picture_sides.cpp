#include "sample/picture_sides.h"

#include <algorithm>

#include "core/error.h"
#include "data/images/bucket_table.h"

namespace kiln {
namespace {

// Returns a side in latents; 0 pixels means that of the weights. `what` names the side; `advice` ends the
// message for a side that does not fit.
int64_t latent_side(const std::string& what, int64_t pixels, const DrawingSource& source,
                    const char* advice = "") {
  const DenoiserShape& shape = source.denoiser->shape();
  const int64_t downsample = source.autoencoder->downsample;
  const int64_t own = shape.input_size * downsample;
  if (pixels == 0) return drawn_side(source.record, shape, downsample);
  if (pixels == own) return shape.input_size;
  if (shape.size_multiple == 0)
    fail("sample", "{} {}: {} draws only pictures of {} x {} pixels{}", what, pixels, source.record.model,
         own, own, advice);
  const int64_t multiple = shape.size_multiple * downsample;
  if (pixels < multiple || pixels % multiple != 0)
    fail("sample", "expected {} to be a multiple of {}, got {}{}", what, multiple, pixels, advice);
  return pixels / downsample;
}

}  // namespace

LatentSides latent_sides(const SampleCommand& command, const DrawingSource& source, const Image* init) {
  const bool has_sides = command.height > 0 || command.width > 0;
  if (init && !has_sides && command.aspect_ratio.empty()) {
    constexpr const char* kAdvice = "; with --height and --width it is resized and cropped to them";
    return {.height = latent_side("the height of --image " + command.image, init->height, source, kAdvice),
            .width = latent_side("the width of --image " + command.image, init->width, source, kAdvice)};
  }
  if (command.aspect_ratio.empty())
    return {.height = latent_side("--height", command.height, source),
            .width = latent_side("--width", command.width, source)};
  if (has_sides) fail("sample", "--aspect-ratio chooses the sides: leave out --height and --width");
  const DenoiserShape& shape = source.denoiser->shape();
  const int64_t downsample = source.autoencoder->downsample;
  const Bucket bucket =
      bucket_of_ratio(command.aspect_ratio, drawn_side(source.record, shape, downsample) * downsample,
                      std::max<int64_t>(shape.size_multiple, 1) * downsample);
  return {.height = latent_side("--aspect-ratio", bucket.height, source),
          .width = latent_side("--aspect-ratio", bucket.width, source)};
}

}  // namespace kiln
