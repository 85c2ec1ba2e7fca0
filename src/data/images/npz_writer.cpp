// A zip file of one stored member, arr_0.npy, with 64-bit sizes. All sizes are known before the first image,
// so the images are appended behind a finished header; only the checksum is filled in at the end. The header
// also holds a hash of the settings that the images were made with.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/byte_writer.h"
#include "core/files/file_system.h"
#include "core/files/xxh3.h"
#include "data/images/npz.h"

namespace kiln {
namespace {

constexpr std::string_view kMember = "arr_0.npy";
constexpr int64_t kChecksumOffset = 14;  // in the local header
constexpr uint16_t kZip64Version = 45;
constexpr uint16_t kZip64Field = 1, kZip64Size = 16;
constexpr uint16_t kSettingsField = 0x6E6B;  // ours: readers skip fields that they do not know
constexpr uint16_t kDosDate = 0x21;          // 1980-01-01: no time stamps, the same images give the same file

std::string npy_header(int64_t num_images, int64_t height, int64_t width) {
  std::string dict = fmt::format("{{'descr': '|u1', 'fortran_order': False, 'shape': ({}, {}, {}, 3), }}",
                                 num_images, height, width);
  dict.append(63 - (10 + dict.size()) % 64, ' ');  // data 64-byte aligned within the member
  dict += '\n';
  return ByteWriter().text("\x93NUMPY").text({"\x01\x00", 2}).u16(dict.size()).text(dict).bytes();
}

// Appends the fields that local and central headers share, from "version needed" to the length of the name.
ByteWriter& common_fields(ByteWriter& out, uint32_t checksum) {
  return out.u16(kZip64Version)
      .u16(0)
      .u16(0)
      .u16(0)
      .u16(kDosDate)
      .u32(checksum)
      .u32(0xFFFFFFFF)
      .u32(0xFFFFFFFF)
      .u16(kMember.size());
}

// The header ends with the hash of the settings.
std::string local_header(uint64_t member_size, std::string_view settings_hash) {
  ByteWriter out;
  out.u32(0x04034b50);
  common_fields(out, 0).u16(4 + kZip64Size + 4 + settings_hash.size()).text(kMember);
  out.u16(kZip64Field).u16(kZip64Size).u64(member_size).u64(member_size);
  return out.u16(kSettingsField).u16(settings_hash.size()).text(settings_hash).bytes();
}

// Returns the central directory and the end records. The one member begins at offset 0.
std::string archive_end(uint64_t member_size, uint64_t directory_offset, uint32_t checksum) {
  ByteWriter out;
  out.u32(0x02014b50).u16(kZip64Version);
  common_fields(out, checksum).u16(4 + kZip64Size).u16(0).u16(0).u16(0).u32(0).u32(0).text(kMember);
  out.u16(kZip64Field).u16(kZip64Size).u64(member_size).u64(member_size);
  const uint64_t directory_size = out.bytes().size();
  out.u32(0x06064b50).u64(44).u16(kZip64Version).u16(kZip64Version).u32(0).u32(0);
  out.u64(1).u64(1).u64(directory_size).u64(directory_offset);
  out.u32(0x07064b50).u32(0).u64(directory_offset + directory_size).u32(1);
  out.u32(0x06054b50).u16(0).u16(0).u16(1).u16(1).u32(directory_size).u32(0xFFFFFFFF).u16(0);
  return out.bytes();
}

class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void open(const std::string& path, int flags) { fd_ = ::open(path.c_str(), flags | O_CLOEXEC, 0666); }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  operator int() const { return fd_; }

 private:
  int fd_ = -1;
};

class Writer : public NpzImageWriter {
 public:
  Writer(const std::string& path, int64_t num_images, int64_t height, int64_t width,
         std::string_view settings)
      : path_(path), partial_(path + ".partial"), num_images_(num_images), height_(height), width_(width) {
    if (num_images < 1 || height < 1 || width < 1)
      fail("npz", "expected images, got {} of {} x {}", num_images, width, height);
    array_header_ = npy_header(num_images, height, width);
    member_size_ = array_header_.size() + num_images * image_bytes();
    const std::string hash = xxh3_hex(std::as_bytes(std::span(settings)));
    header_ = local_header(member_size_, hash) + array_header_;
    settings_size_ = hash.size();
    settings_offset_ = header_.size() - array_header_.size() - settings_size_;
    if (::access(path.c_str(), F_OK) == 0)
      check_finished_file();
    else
      open_partial();
  }

  int64_t num_written() const override { return num_written_; }

  void add(const Image& image) override {
    if (image.height != height_ || image.width != width_)
      fail("npz", "expected images of {} x {}, got {} x {}", width_, height_, image.width, image.height);
    if (num_written_ == num_images_) fail("npz", "expected {} images, got one more ({})", num_images_, path_);
    write(data_end(), std::as_bytes(std::span(image.rgb)));
    checksum_ = crc32_z(checksum_, image.rgb.data(), image.rgb.size());
    ++num_written_;
  }

  void finish() override {
    if (num_written_ != num_images_)
      fail("npz", "expected {} images, got {} ({})", num_images_, num_written_, path_);
    if (fd_ < 0) return;  // it was complete when it was opened
    const std::string end = archive_end(member_size_, data_end(), static_cast<uint32_t>(checksum_));
    write(data_end(), std::as_bytes(std::span(end)));
    const std::string checksum = ByteWriter().u32(checksum_).bytes();
    write(kChecksumOffset, std::as_bytes(std::span(checksum)));
    if (::fsync(fd_) != 0 || ::rename(partial_.c_str(), path_.c_str()) != 0) fail_writing();
    fd_.close();
  }

 private:
  int64_t image_bytes() const { return height_ * width_ * 3; }
  int64_t data_end() const { return static_cast<int64_t>(header_.size()) + num_written_ * image_bytes(); }
  [[noreturn]] void fail_writing() const { fail_with_errno("npz", "write", path_, errno); }

  void write(int64_t offset, std::span<const std::byte> bytes) {
    if (!write_at(fd_, bytes, offset)) fail_writing();
  }

  // Returns false if the file is shorter.
  bool read(int fd, const std::string& file, int64_t offset, std::span<std::byte> to) const {
    const int64_t got = read_at(fd, to, offset);
    if (got < 0) fail("npz", "cannot read {}: {}", file, std::strerror(errno));
    return got == std::ssize(to);
  }

  // Returns the bytes of a file before the images, with 0 in place of the checksum, which only a finished
  // file has. "" if the file is shorter.
  std::string header_of(int fd, const std::string& file) const {
    std::string found(header_.size(), '\0');
    if (!read(fd, file, 0, std::as_writable_bytes(std::span(found)))) return "";
    return found.replace(kChecksumOffset, 4, 4, '\0');
  }

  // Throws Error if the header `found` in `file` differs from this run's only in the settings.
  void check_settings(std::string found, const std::string& file) const {
    if (found == header_ || found.empty()) return;
    found.replace(settings_offset_, settings_size_, header_, settings_offset_, settings_size_);
    if (found == header_)
      fail("npz",
           "{} holds images drawn with other settings (weights, classes, sampler, seed, ...): remove it or "
           "choose another name",
           file);
  }

  void check_finished_file() {
    Descriptor fd;
    fd.open(path_, O_RDONLY);
    if (fd < 0) fail("npz", "cannot read {}: {}", path_, std::strerror(errno));
    struct stat status {};
    const int64_t data_size = static_cast<int64_t>(header_.size()) + num_images_ * image_bytes();
    const std::string found = header_of(fd, path_);
    check_settings(found, path_);
    if (found != header_ || ::fstat(fd, &status) != 0 || status.st_size <= data_size)
      fail("npz",
           "expected no file or one of {} images of {} x {}, got another: remove it or choose another name "
           "({})",
           num_images_, width_, height_, path_);
    num_written_ = num_images_;
  }

  void open_partial() {
    fd_.open(partial_, O_RDWR | O_CREAT | O_NOFOLLOW);
    struct stat status {};
    if (fd_ < 0 || ::fstat(fd_, &status) != 0) fail_writing();
    const int64_t header_size = static_cast<int64_t>(header_.size());
    if (status.st_size >= header_size) {
      const std::string found = header_of(fd_, partial_);
      check_settings(found, partial_);
      if (found != header_)
        fail("npz", "{} holds other images than {} of {} x {}: remove it or choose another name", partial_,
             num_images_, width_, height_);
      num_written_ = std::min((status.st_size - header_size) / image_bytes(), num_images_);
    }
    if (::ftruncate(fd_, num_written_ > 0 ? data_end() : 0) != 0) fail_writing();
    write(0, std::as_bytes(std::span(header_)));
    checksum_ = crc32_z(0, reinterpret_cast<const uint8_t*>(array_header_.data()), array_header_.size());
    add_written_images_to_checksum();
  }

  void add_written_images_to_checksum() {
    std::vector<uint8_t> image(image_bytes());
    for (int64_t i = 0; i < num_written_; ++i) {
      const int64_t offset = static_cast<int64_t>(header_.size()) + i * image_bytes();
      if (!read(fd_, partial_, offset, std::as_writable_bytes(std::span(image))))
        fail("npz", "{} became shorter while it was read", partial_);
      checksum_ = crc32_z(checksum_, image.data(), image.size());
    }
  }

  const std::string path_, partial_;
  const int64_t num_images_, height_, width_;
  std::string array_header_, header_;               // header_: the zip's local header and the array's
  size_t settings_offset_ = 0, settings_size_ = 0;  // of the settings' hash in header_
  uint64_t member_size_ = 0;
  int64_t num_written_ = 0;
  uLong checksum_ = 0;
  Descriptor fd_;  // of the partial file; closed when it is finished
};

}  // namespace

std::unique_ptr<NpzImageWriter> NpzImageWriter::open(const std::string& path, int64_t num_images,
                                                     int64_t height, int64_t width,
                                                     std::string_view settings) {
  return std::make_unique<Writer>(path, num_images, height, width, settings);
}

}  // namespace kiln
