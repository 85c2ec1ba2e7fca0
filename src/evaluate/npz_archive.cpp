#include "evaluate/npz_archive.h"

#include <fmt/ranges.h>
#include <unistd.h>
#include <zip.h>

#include <algorithm>

#include "checkpoint/zip_writer.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/byte_writer.h"
#include "core/files/input_file.h"

namespace kiln {
namespace {

struct CloseArchive {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct CloseMember {
  void operator()(zip_file_t* member) const { zip_fclose(member); }
};

std::string text_of(int code) {
  zip_error_t error;
  zip_error_init_with_code(&error, code);
  std::string text = zip_error_strerror(&error);
  zip_error_fini(&error);
  return text;
}

// zlib packs no more bytes into one. An archive that claims more would take memory without end.
constexpr uint64_t kMaxDeflateRatio = 1032;

// A member that is being read from front to back.
struct Stream {
  std::unique_ptr<zip_file_t, CloseMember> file;
  NpyHeader header;
  int64_t next_row = 0;
};

}  // namespace

struct NpzArchive::Impl {
  std::string path;
  std::unique_ptr<zip_t, CloseArchive> archive;
  std::map<std::string, Stream> streams;

  std::string name_of(const std::string& array) const { return fmt::format("{} of {}", array, path); }

  void read(Stream& stream, const std::string& array, std::byte* to, uint64_t count) const {
    while (count > 0) {
      const zip_int64_t got = zip_fread(stream.file.get(), to, count);
      if (got <= 0) fail("npz", "the archive is truncated or damaged ({})", name_of(array));
      to += got;
      count -= static_cast<uint64_t>(got);
    }
  }

  Stream open(const std::string& array) const {
    Stream stream;
    stream.file.reset(zip_fopen(archive.get(), (array + ".npy").c_str(), 0));
    if (!stream.file) fail("npz", "{} holds no array \"{}\"", path, array);
    constexpr size_t kBegin = 12;
    std::vector<std::byte> begin(kBegin);
    read(stream, array, begin.data(), kBegin);
    const size_t size = npy_header_bytes(begin, name_of(array));
    constexpr size_t kMostBytes = 1 << 20;
    if (size < kBegin || size > kMostBytes) fail("npz", "the header is malformed ({})", name_of(array));
    begin.resize(size);
    read(stream, array, begin.data() + kBegin, size - kBegin);
    stream.header = parse_npy_header(begin, name_of(array));
    check_sizes(array, size + stream.header.data_bytes);
    return stream;
  }

  void check_sizes(const std::string& array, uint64_t num_bytes) const {
    zip_stat_t status;
    constexpr zip_uint64_t kNeeded = ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE;
    if (zip_stat(archive.get(), (array + ".npy").c_str(), 0, &status) != 0 ||
        (status.valid & kNeeded) != kNeeded || status.size != num_bytes ||
        status.size / kMaxDeflateRatio > status.comp_size)
      fail("npz", "the array's size is not that of its header ({})", name_of(array));
  }

  // Compares the checksum, for which libzip waits until the end is read. REQUIRES: all rows were read.
  void finish(const Stream& stream, const std::string& array) const {
    std::byte beyond{};
    if (zip_fread(stream.file.get(), &beyond, 1) != 0)
      fail("npz", "the archive is damaged ({}): its checksum is another", name_of(array));
  }
};

NpzArchive::NpzArchive(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  int code = 0;
  const int fd = open_input("npz", path);
  impl_->archive.reset(zip_fdopen(fd, 0, &code));
  if (!impl_->archive) ::close(fd);
  if (!impl_->archive) fail("npz", "cannot open {}: {}", path, text_of(code));
}

NpzArchive::~NpzArchive() {
  impl_->streams.clear();  // they must close before their archive
}

bool NpzArchive::has(const std::string& name) const {
  return zip_name_locate(impl_->archive.get(), (name + ".npy").c_str(), 0) >= 0;
}

NpyHeader NpzArchive::header(const std::string& name) const { return impl_->open(name).header; }

at::Tensor NpzArchive::read(const std::string& name) const {
  Stream stream = impl_->open(name);
  const Dtype dtype = stream.header.dtype;
  if (dtype != Dtype::kF64 && dtype != Dtype::kF32)
    fail("npz", "expected f32 or f64, got {} ({})", dtype_name(dtype), impl_->name_of(name));
  at::Tensor values = at::empty(stream.header.shape, dtype == Dtype::kF64 ? at::kDouble : at::kFloat);
  impl_->read(stream, name, static_cast<std::byte*>(values.data_ptr()), stream.header.data_bytes);
  impl_->finish(stream, name);
  return values.to(at::kDouble);
}

std::vector<std::byte> NpzArchive::rows(const std::string& name, int64_t first, int64_t count) {
  auto found = impl_->streams.find(name);
  if (found == impl_->streams.end() || found->second.next_row > first) {
    if (found != impl_->streams.end()) impl_->streams.erase(found);
    found = impl_->streams.emplace(name, impl_->open(name)).first;
  }
  Stream& stream = found->second;
  const std::vector<int64_t>& shape = stream.header.shape;
  if (shape.empty() || shape[0] < first + count)
    fail("npz", "expected {} rows, got {} ({})", first + count, shape.empty() ? 0 : shape[0],
         impl_->name_of(name));
  const uint64_t row_bytes = stream.header.data_bytes / static_cast<uint64_t>(shape[0]);
  std::vector<std::byte> bytes(row_bytes * static_cast<uint64_t>(count));
  constexpr int64_t kSkippedAtOnce = 64;
  while (stream.next_row < first) {
    const int64_t skipped = std::min(kSkippedAtOnce, first - stream.next_row);
    std::vector<std::byte> unused(row_bytes * static_cast<uint64_t>(skipped));
    impl_->read(stream, name, unused.data(), unused.size());
    stream.next_row += skipped;
  }
  impl_->read(stream, name, bytes.data(), bytes.size());
  stream.next_row += count;
  if (stream.next_row == shape[0]) impl_->finish(stream, name);
  return bytes;
}

void write_npz(const std::string& path, const std::map<std::string, at::Tensor>& arrays) {
  ZipWriter zip("npz", path);
  for (const auto& [name, array] : arrays) {
    const at::Tensor values = array.to(at::kCPU, at::kDouble).contiguous();
    std::string dict =
        fmt::format("{{'descr': '<f8', 'fortran_order': False, 'shape': ({},{}), }}", values.size(0),
                    values.dim() > 1 ? fmt::format(" {}", values.size(1)) : "");
    dict.append(63 - (10 + dict.size()) % 64, ' ');
    ByteWriter content;
    content.text("\x93NUMPY").text({"\x01\x00", 2}).u16(dict.size() + 1).text(dict).text("\n");
    content.text({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
    zip.add(name + ".npy", content.bytes());
  }
  zip.commit();
}

}  // namespace kiln
