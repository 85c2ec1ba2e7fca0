// The samples of a shard that is not full yet, as an append-only file: what a killed extraction leaves
// behind.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace kiln {

// Records are checksummed; a torn last one (the process was killed while writing) is dropped when reading.
class SampleLog {
 public:
  struct Record {
    int64_t sample = 0;  // index in the whole store
    int64_t label = -1;
    std::string_view name, caption;
    std::span<const std::byte> mean, logvar;  // of the store's dtype
    int64_t lane = 0;
    std::array<int64_t, 2> image_hw{};
  };

  explicit SampleLog(std::string path);
  ~SampleLog();
  SampleLog(const SampleLog&) = delete;
  SampleLog& operator=(const SampleLog&) = delete;

  // Calls `visit` for each whole record and cuts what follows the last one; appending continues there.
  // Stops, and cuts, where `visit` says no.
  void recover(const std::function<bool(const Record&)>& visit);
  // Throws Error (disk full); the file then ends behind the record before.
  void append(const Record& record);
  // Forgets all records.
  void clear();
  void remove();

 private:
  void cut(int64_t size);

  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

}  // namespace kiln
