#include "data/images/image_dataset.h"

#include <algorithm>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/files/xxh3.h"
#include "data/images/image_header.h"
#include "data/images/images.h"
#include "data/images/ordered_workers.h"

namespace kiln {

std::string dataset_fingerprint(const ImageDataset& dataset) {
  std::string text;
  for (const ImageRecord& record : dataset.records())
    text += fmt::format("{}\t{}\n", record.name, record.label);
  return xxh3_hex(std::as_bytes(std::span(text)));
}

std::vector<std::byte> ImageDataset::read(int64_t index) const {
  const PictureBytes file = bytes(index);
  return file.read(0, file.size);
}

PngTexts ImageDataset::png_texts(int64_t index) const {
  const PictureBytes file = bytes(index);
  return kiln::png_texts(file.read(0, file.size));
}

ImageHeader ImageDataset::header(int64_t index) const {
  return read_image_header(bytes(index), records_.at(index).name);
}

Image ImageDataset::load(int64_t index, bool orient) const {
  const std::vector<std::byte> file = read(index);
  const std::string& name = records_.at(index).name;
  try {
    Image image = decode_image(file, name);
    if (!orient) return image;
    return upright(std::move(image), read_image_header(bytes_in_memory(file), name).orientation);
  } catch (const Error& error) {
    throw BrokenPicture(message_of(error));
  }
}

std::string too_small_text(const std::string& name, int64_t height, int64_t width, int64_t size) {
  return fmt::format("the picture {} is too small: {} x {}, expected at least {} on the short side", name,
                     width, height, size);
}

Image load_cropped(const ImageDataset& dataset, int64_t index, const Crop& crop) {
  const Image image = dataset.load(index, crop.orient);
  if (!crop.enlarge && std::min(image.height, image.width) < crop.size)
    throw BrokenPicture(too_small_text(dataset.records()[index].name, image.height, image.width, crop.size));
  return center_crop(image, crop.size);
}

struct ImagePipeline::Impl {
  OrderedWorkers<PreparedImage> workers;
};

ImagePipeline::ImagePipeline(int64_t first, int64_t last, std::function<Image(int64_t)> load, int num_threads,
                             int64_t queue_depth) {
  const auto prepare = [load = std::move(load)](int64_t index) {
    PreparedImage prepared{index, {}, {}};
    try {
      prepared.image = load(index);
    } catch (const BrokenPicture& error) {
      prepared.error = message_of(error);
    } catch (const NoSuchFile& error) {
      prepared.error = message_of(error);
    }
    return prepared;
  };
  impl_.reset(new Impl{{first, last, num_threads, queue_depth, prepare}});
}

ImagePipeline::~ImagePipeline() = default;

bool ImagePipeline::next(PreparedImage& out) {
  auto prepared = impl_->workers.next();
  if (prepared) out = std::move(*prepared);
  return prepared.has_value();
}

}  // namespace kiln
