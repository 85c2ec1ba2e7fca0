#include "sample/init_picture.h"

#include <ATen/core/grad_mode.h>

#include <span>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/philox.h"
#include "data/store/latent_kernels.h"

namespace kiln {
namespace {

// (1, 3, H, W) f32 in [-1, 1].
at::Tensor pixels_of(const Image& image) {
  const at::Tensor bytes =
      at::from_blob(const_cast<uint8_t*>(image.rgb.data()), {1, image.height, image.width, 3}, at::kByte);
  return (bytes.permute({0, 3, 1, 2}).to(at::kFloat) / 127.5 - 1).contiguous();
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

}  // namespace kiln
