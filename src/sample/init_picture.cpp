#include "sample/init_picture.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <span>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/philox.h"
#include "data/images/bucket_table.h"
#include "data/store/latent_kernels.h"

namespace kiln {

namespace {

// (1, 3, H, W) f32 in [-1, 1].
at::Tensor pixels_of(const Image& image) {
  const at::Tensor bytes =
      at::from_blob(const_cast<uint8_t*>(image.rgb.data()), {1, image.height, image.width, 3}, at::kByte);
  return (bytes.permute({0, 3, 1, 2}).to(at::kFloat) / 127.5 - 1).contiguous();
}

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

InitPicture read_init_picture(const std::string& path) {
  InitPicture picture;
  try {
    picture.image = read_image(path);
  } catch (const Error& error) {
    fail("sample", "--image {}: {}", path, message_of(error));
  }
  picture.fingerprint = fmt::format("{} x {} xxh3:{}", picture.image.height, picture.image.width,
                                    xxh3_hex(std::as_bytes(std::span(picture.image.rgb))));
  return picture;
}

std::function<at::Tensor(const std::vector<int64_t>& images)> start_from(const InitPicture& picture,
                                                                         const Autoencoder& autoencoder,
                                                                         const LatentSides& sides,
                                                                         uint64_t seed, at::Device device) {
  const at::NoGradGuard no_grad;
  const Image& given = picture.image;
  const int64_t height = sides.height * autoencoder.downsample, width = sides.width * autoencoder.downsample;
  const bool fits = given.height == height && given.width == width;
  const at::Tensor moments =
      autoencoder.encode(pixels_of(fits ? given : cover_crop(given, height, width)).to(device))
          .to(at::kCPU, at::kFloat)
          .contiguous();
  const auto shift = static_cast<float>(autoencoder.shift_factor);
  const auto scale = static_cast<float>(autoencoder.scaling_factor);
  return [=, channels = autoencoder.latent_channels,
          has_posterior = autoencoder.has_posterior](const std::vector<int64_t>& images) {
    const at::Tensor latents =
        moments.narrow(1, 0, channels).repeat({static_cast<int64_t>(images.size()), 1, 1, 1});
    const auto size = static_cast<size_t>(latents[0].numel());
    const std::span all(latents.mutable_data_ptr<float>(), images.size() * size);
    const std::span logvar = std::span(moments.const_data_ptr<float>(), moments.numel()).subspan(size);
    std::vector<float> epsilon(size);
    for (size_t i = 0; i < images.size(); ++i) {
      const auto x = all.subspan(i * size, size);
      if (!has_posterior) {
        scale_latents(x, shift, scale);
        continue;
      }
      philox_normal(seed, Draw::kPosterior, static_cast<uint64_t>(images[i]), epsilon);
      draw_posterior(x, logvar, epsilon, shift, scale);
    }
    return latents.to(device);
  };
}

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
