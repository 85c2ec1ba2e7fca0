#include "extract/check_data.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/text/progress_line.h"
#include "data/images/bucket_assignment.h"
#include "data/images/color_note.h"
#include "data/images/ordered_workers.h"
#include "data/images/picture_look.h"
#include "models/text/caption_encoder.h"
#include "parallel/cpu_share.h"

namespace kiln {

namespace {

// What is seen of one picture alone.
struct SeenPicture {
  PictureSize size{};  // 0 x 0: its header cannot be read
  int64_t num_bytes = 0;
  uint64_t hash = 0;  // of the file
  PictureLook look{};
  std::string broken{}, extension{}, colors{};  // messages, or ""
  CheckedCaptions captions{};
  std::string no_caption{};
};

// Returns a message if the name says another format than the file has, else "".
std::string extension_note(const std::string& name, PictureFormat format) {
  std::string extension = std::filesystem::path(name).extension();
  std::ranges::transform(extension, extension.begin(), [](unsigned char c) { return std::tolower(c); });
  const bool fits = format == PictureFormat::kJpeg  ? extension == ".jpg" || extension == ".jpeg"
                    : format == PictureFormat::kPng ? extension == ".png"
                                                    : extension == ".webp";
  return fits ? "" : fmt::format("{} is a {}", name, choice_name(format));
}

class DataCheck {
 public:
  explicit DataCheck(const CheckOptions& options)
      : options_(options),
        extract_(options.extract),
        num_threads_(resolve(extract_, 0, num_own_cpus()).num_workers),
        similar_(static_cast<int>(options.similar_bits)),
        // Sides need not be multiples of anything here: which, the autoencoder will say.
        table_(extract_.buckets.empty()
                   ? std::vector<Bucket>{{extract_.image_size, extract_.image_size, 1}}
                   : parse_buckets(extract_.buckets, extract_.image_size, /*multiple=*/1)) {
    check_caption_options(extract_.text);
    data_.dataset = ImageDataset::open(extract_.data);
    if (!options.move_to.empty()) check_move(options, *data_.dataset);
    const CaptionEncodingOptions& text = extract_.text;
    if (text.encoder.empty()) return;
    tokenizer_ = text::load_tokenizer(text.encoder);
    encoder_.emplace(text.encoder, text.max_tokens, at::kCPU, at::kFloat, EncoderRoom{}, EncoderUse::kOutline,
                     text.instruction);
    data_.captions.max_tokens = encoder_->max_tokens();
  }

  CheckedData run() {
    const auto count = std::ssize(records());
    constexpr int64_t kAhead = 256;
    OrderedWorkers<SeenPicture> workers(0, count, num_threads_, kAhead,
                                        [this](int64_t index) { return see(index); });
    ProgressLine progress(0, count);
    for (int64_t index = 0; index < count; ++index) {
      note(index, *workers.next());
      progress.update(static_cast<double>(index + 1), num_broken_);
    }
    progress.finish(count, num_broken_);
    fill_buckets();
    if (data_.captions.num_captions == 0 &&
        !encoder_)  // the data set is one of classes, or of pictures alone
      std::erase_if(data_.found, [](const FoundPicture& of) { return of.finding == Finding::kNoCaption; });
    std::ranges::stable_sort(data_.found, {},
                             [](const FoundPicture& of) { return std::pair(of.finding, of.picture); });
    return std::move(data_);
  }

 private:
  const std::vector<ImageRecord>& records() const { return data_.dataset->records(); }
  const std::string& name_of(int64_t index) const { return records()[static_cast<size_t>(index)].name; }

  // Runs in several threads.
  SeenPicture see(int64_t index) const {
    SeenPicture seen;
    try {
      const std::vector<std::byte> file = data_.dataset->read(index);
      seen.num_bytes = std::ssize(file);
      seen.hash = xxh3(file);
      see_pixels(file, name_of(index), seen);
    } catch (const Error& error) {
      seen.broken = message_of(error);
    }
    try {
      for (const Caption& caption : captions_of(*data_.dataset, index, extract_.text))
        see_caption(caption.text, seen.captions);
      if (seen.captions.num_captions == 0) seen.no_caption = name_of(index) + " has no caption";
    } catch (const Error& error) {
      ++seen.captions.num_captions;  // there is one, but not in UTF-8
      seen.no_caption = message_of(error);
    }
    return seen;
  }

  // Throws Error as extraction does.
  void see_pixels(std::span<const std::byte> file, const std::string& name, SeenPicture& seen) const {
    const ImageHeader header = read_image_header(bytes_in_memory(file), name);
    const bool orients = extract_.exif_orientation == "apply";
    seen.size = {.height = orients ? header.upright_height() : header.height,
                 .width = orients ? header.upright_width() : header.width};
    const int64_t shrink = look_shrink(header.height, header.width);
    constexpr int64_t kMostOfJpeg = 8;
    const int64_t decoded = header.format == PictureFormat::kJpeg ? std::min(shrink, kMostOfJpeg) : 1;
    const Image image = decode_image(file, name, kMaxImagePixels, static_cast<int>(decoded));
    if (image.height != (header.height + decoded - 1) / decoded ||
        image.width != (header.width + decoded - 1) / decoded)
      throw BrokenPicture(fmt::format("the picture {} has another size than its header says", name));
    seen.look = look_of(image, shrink / decoded);
    seen.extension = extension_note(name, header.format);
    if (const std::string note = color_note(file, header.format); !note.empty())
      seen.colors = fmt::format("{}: {}", name, note);
  }

  void see_caption(const std::string& caption, CheckedCaptions& captions) const {
    ++captions.num_captions;
    if (!encoder_) return;
    int64_t num_cut = 0;
    encoder_->tokens_of(caption, num_cut);
    const int64_t num_tokens =
        std::ssize(tokenizer_->encode(extract_.text.instruction + caption)) - encoder_->num_hidden_tokens();
    captions.num_tokens += num_tokens;
    captions.num_cut += num_cut;
    if (num_cut > 0) captions.num_lost_tokens += num_tokens - encoder_->max_tokens();
  }

  void find(int64_t picture, Finding finding, std::string why, int64_t like = -1) {
    data_.found.push_back({.picture = picture, .finding = finding, .why = std::move(why), .like = like});
  }

  // Runs in one thread, in the order of the data set.
  void note(int64_t index, const SeenPicture& seen) {
    data_.num_bytes += seen.num_bytes;
    sizes_.push_back(seen.size);
    is_broken_.push_back(!seen.broken.empty());
    num_broken_ += !seen.broken.empty();
    if (!seen.broken.empty())
      find(index, Finding::kBroken, seen.broken);
    else
      note_look(index, seen);
    if (!seen.extension.empty()) find(index, Finding::kExtension, seen.extension);
    if (!seen.colors.empty()) find(index, Finding::kColors, seen.colors);
    if (!seen.no_caption.empty()) find(index, Finding::kNoCaption, seen.no_caption);
    const CheckedCaptions& own = seen.captions;
    if (own.num_cut > 0)
      find(index, Finding::kCutCaption,
           fmt::format("{}: {} of {} tokens are cut", name_of(index), own.num_lost_tokens, own.num_tokens));
    data_.captions.num_captions += own.num_captions;
    data_.captions.num_cut += own.num_cut;
    data_.captions.num_tokens += own.num_tokens;
    data_.captions.num_lost_tokens += own.num_lost_tokens;
  }

  void note_look(int64_t index, const SeenPicture& seen) {
    const auto [first, is_first] = by_bytes_.try_emplace({seen.hash, seen.num_bytes}, index);
    if (!is_first && data_.dataset->read(first->second) == data_.dataset->read(index))
      return find(index, Finding::kCopy,
                  fmt::format("{} is a copy of {}", name_of(index), name_of(first->second)), first->second);
    if (const auto like = similar_.find_or_add(index, seen.look))
      find(index, Finding::kSimilar, fmt::format("{} looks like {}", name_of(index), name_of(*like)), *like);
    if (seen.look.sharpness < options_.blurred_below)
      find(index, Finding::kBlurred,
           fmt::format("{} has a sharpness of {:.1f}", name_of(index), seen.look.sharpness));
  }

  // Assigns the pictures as extraction does. The square is a bucket that every picture is nearest to.
  void fill_buckets() try {
    std::vector<CheckedBucket> rows;
    for (const Bucket& bucket : table_) rows.push_back({.bucket = bucket});
    const BucketAssignment assignment = assign_buckets(table_, sizes_, extract_.bucket_min, extract_.enlarge);
    for (const BucketAssignment::Filled& filled : assignment.filled)
      for (CheckedBucket& row : rows)
        if (row.bucket.height == filled.bucket.height && row.bucket.width == filled.bucket.width)
          fill(filled, row);
    for (const int64_t index : assignment.too_small) {
      const PictureSize& size = sizes_[static_cast<size_t>(index)];
      CheckedBucket& row = rows[nearest_bucket(table_, size.height, size.width)];
      if (is_broken_[static_cast<size_t>(index)]) {
        ++row.num_broken;
        continue;
      }
      ++row.num_small;
      find(index, Finding::kSmall,
           extract_.buckets.empty()
               ? too_small_text(name_of(index), size.height, size.width, extract_.image_size)
               : not_covering_text(name_of(index), size));
    }
    std::ranges::copy_if(rows, std::back_inserter(data_.buckets), [](const CheckedBucket& row) {
      return row.num_taken + row.num_small + row.num_broken > 0;
    });
  } catch (const Error& error) {
    data_.no_buckets = message_of(error);
  }

  void fill(const BucketAssignment::Filled& filled, CheckedBucket& row) const {
    const auto height = static_cast<double>(row.bucket.height), width = static_cast<double>(row.bucket.width);
    for (const int64_t index : filled.pictures) {
      if (is_broken_[static_cast<size_t>(index)]) {
        ++row.num_broken;
        continue;
      }
      const PictureSize& size = sizes_[static_cast<size_t>(index)];
      const double to_height = height / static_cast<double>(size.height),
                   to_width = width / static_cast<double>(size.width);
      ++row.num_taken;
      row.num_enlarged += std::max(to_height, to_width) > 1;
      row.cut_share += 1 - std::min(to_height, to_width) / std::max(to_height, to_width);
    }
    if (row.num_taken > 0) row.cut_share /= static_cast<double>(row.num_taken);
  }

  const CheckOptions& options_;
  const ExtractOptions& extract_;
  const int num_threads_;
  LookIndex similar_;
  const std::vector<Bucket> table_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::optional<CaptionEncoder> encoder_;
  CheckedData data_;
  std::vector<PictureSize> sizes_;
  std::vector<bool> is_broken_;
  int64_t num_broken_ = 0;
  std::map<std::pair<uint64_t, int64_t>, int64_t> by_bytes_;  // hash and size of a file: the first picture
};

}  // namespace

CheckedData check_data(const CheckOptions& options) {
  CheckOptions own = options;
  own.extract.device = "cpu";
  own.extract.autoencoder = "pixels";  // as then, all processors decode
  constexpr int64_t kMostBits = 7;
  if (own.similar_bits < 0 || own.similar_bits > kMostBits)
    fail("check-data", "--similar-bits expects 0 to {}, got {}", kMostBits, own.similar_bits);
  if (own.extract.buckets.empty()) check_image_size(1, own.extract.image_size);
  return DataCheck(own).run();
}

int64_t num_taken(const CheckedData& data) {
  int64_t sum = 0;
  for (const CheckedBucket& row : data.buckets) sum += row.num_taken;
  return sum;
}

}  // namespace kiln
