#include "evaluate/picture_set.h"

#include <cstring>
#include <filesystem>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/printable.h"
#include "core/threads/parallel_pieces.h"
#include "data/images/image_dataset.h"
#include "evaluate/npz_archive.h"

namespace kiln {
namespace {

// Stacks images of one size: bytes (n, H, W, 3) -> (n, 3, H, W).
at::Tensor stacked(const std::vector<Image>& images, size_t first, size_t count) {
  const int64_t height = images[first].height, width = images[first].width;
  at::Tensor pictures = at::empty({static_cast<int64_t>(count), height, width, 3}, at::kByte);
  const size_t bytes = static_cast<size_t>(height * width * 3);
  for (size_t i = 0; i < count; ++i)
    std::memcpy(pictures.mutable_data_ptr<uint8_t>() + i * bytes, images[first + i].rgb.data(), bytes);
  return pictures.permute({0, 3, 1, 2}).contiguous();
}

class FolderPictures : public PictureSource {
 public:
  FolderPictures(const std::string& path, int64_t crop, bool skips_broken)
      : dataset_(ImageDataset::open(path)), crop_(crop), skips_broken_(skips_broken) {
    const bool is_sampled = std::filesystem::exists(std::filesystem::path(path) / "sampling.json");
    for (size_t i = 0; i < dataset_->records().size(); ++i)
      if (!is_sampled || dataset_->records()[i].name != "grid.png")
        indices_.push_back(static_cast<int64_t>(i));
  }
  int64_t size() const override { return static_cast<int64_t>(indices_.size()); }

  void for_each_batch(int64_t first, int64_t last, int64_t batch, const Sink& sink) override {
    for (; first < last; first += batch) {
      const int64_t count = std::min(batch, last - first);
      std::vector<Image> images(static_cast<size_t>(count));  // those that are skipped stay empty
      std::vector<std::string> skipped(images.size());
      const auto skip = [&](size_t i, const Error& error) {  // called while `error` is handled
        if (!skips_broken_) throw;
        skipped[i] = message_of(error);
      };
      parallel_pieces(count, 1, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) try {
            images[i] = load(first + static_cast<int64_t>(i));
          } catch (const BrokenPicture& error) {
            skip(i, error);
          } catch (const NoSuchFile& error) {
            skip(i, error);
          }
      });
      for (const std::string& why : skipped)
        if (!why.empty()) fmt::print(stderr, "skipped: {}\n", printable(why));
      for (size_t begin = 0; begin < images.size();) {  // runs of one size
        if (!skipped[begin].empty()) {
          ++begin;
          continue;
        }
        size_t end = begin + 1;
        while (end < images.size() && images[end].height == images[begin].height &&
               images[end].width == images[begin].width)
          ++end;
        sink(first + static_cast<int64_t>(begin), stacked(images, begin, end - begin));
        begin = end;
      }
    }
  }

 private:
  Image load(int64_t position) const {
    const int64_t index = indices_[static_cast<size_t>(position)];
    // The reference programs behind published numbers ignore the orientation tag.
    if (crop_ > 0) return load_cropped(*dataset_, index, {.size = crop_, .enlarge = true, .orient = false});
    return dataset_->load(index);
  }

  std::unique_ptr<ImageDataset> dataset_;
  std::vector<int64_t> indices_;  // the records that are judged
  int64_t crop_;
  bool skips_broken_;
};

class NpzPictures : public PictureSource {
 public:
  explicit NpzPictures(const std::string& path) : archive_(path) {
    header_ = archive_.header("arr_0");
    const std::vector<int64_t>& shape = header_.shape;
    if (header_.dtype != Dtype::kU8 || shape.size() != 4 || shape[3] != 3 || header_.data_bytes == 0)
      fail("evaluate", "expected arr_0 of {} to be pictures, U8 (N, H, W, 3)", path);
  }
  int64_t size() const override { return header_.shape[0]; }

  void for_each_batch(int64_t first, int64_t last, int64_t batch, const Sink& sink) override {
    for (; first < last; first += batch) {
      const int64_t count = std::min(batch, last - first);
      const std::vector<std::byte> bytes = archive_.rows("arr_0", first, count);
      at::Tensor pictures = at::empty({count, header_.shape[1], header_.shape[2], 3}, at::kByte);
      std::memcpy(pictures.data_ptr(), bytes.data(), bytes.size());
      sink(first, pictures.permute({0, 3, 1, 2}).contiguous());
    }
  }

 private:
  NpzArchive archive_;
  NpyHeader header_;
};

}  // namespace

std::unique_ptr<PictureSource> PictureSource::open(const std::string& path, int64_t crop, bool skips_broken) {
  if (!std::filesystem::exists(path)) fail("evaluate", "{} does not exist", path);
  if (!path.ends_with(".npz")) return std::make_unique<FolderPictures>(path, crop, skips_broken);
  if (crop > 0) fail("evaluate", "pictures of an .npz are taken as they are: leave out --crop for {}", path);
  return std::make_unique<NpzPictures>(path);
}

}  // namespace kiln
