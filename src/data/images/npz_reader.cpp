#include <archive.h>
#include <archive_entry.h>

#include <algorithm>

#include "core/error.h"
#include "core/files/input_file.h"
#include "data/images/npz.h"

namespace kiln {

std::map<std::string, NpyArray> read_npz(const std::string& path) {
  const std::unique_ptr<archive, decltype(&archive_read_free)> zip(archive_read_new(), archive_read_free);
  archive_read_support_format_zip(zip.get());
  const auto refuse = [&] {
    const char* why = archive_error_string(zip.get());
    fail("npz", "expected an archive of numpy.savez, got none: {} ({})", why ? why : "unreadable", path);
  };
  const RandomAccessFile file("npz", path);
  if (archive_read_open_fd(zip.get(), file.fd(), 1 << 16) != ARCHIVE_OK) refuse();
  // Members that overlap would unpack to more than zlib can pack into the file.
  constexpr int64_t kMostUnpacked = 1032;
  int64_t left = std::max<int64_t>(file.size(), 1 << 20) * kMostUnpacked;
  std::map<std::string, NpyArray> arrays;
  for (archive_entry* entry = nullptr;;) {
    const int status = archive_read_next_header(zip.get(), &entry);
    if (status == ARCHIVE_EOF) return arrays;
    if (status != ARCHIVE_OK && status != ARCHIVE_WARN) refuse();
    const char* own_name = archive_entry_pathname(entry);
    std::string name = own_name ? own_name : "";
    // A streamed archive gives no sizes in advance, and the sizes that an archive gives may be wrong.
    std::vector<std::byte> bytes;
    for (size_t filled = 0;;) {
      bytes.resize(filled + (1 << 20));
      const la_ssize_t got = archive_read_data(zip.get(), bytes.data() + filled, bytes.size() - filled);
      if (got < 0) refuse();
      if ((left -= got) < 0)
        fail("npz", "the archive unpacks to more than it can hold ({}): it is damaged", path);
      filled += static_cast<size_t>(got);
      if (got > 0) continue;
      bytes.resize(filled);
      break;
    }
    if (name.ends_with(".npy")) name.resize(name.size() - 4);
    arrays.emplace(name, parse_npy(bytes, fmt::format("{}, {}", path, name)));
  }
}

}  // namespace kiln
