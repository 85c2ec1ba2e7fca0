// An append-only file of the samples of a shard that is not full yet. A killed extraction leaves it behind.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace kiln {

// Records are checksummed. Reading drops a torn last one (the process was killed while writing).
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

  // Calls `visit` for each whole record, until it returns false. Cuts the file behind the last record that
  // `visit` accepted; appending continues there.
  void recover(const std::function<bool(const Record&)>& visit);
  // Throws Error (disk full). The file then still ends behind the record before.
  void append(const Record& record);
  // Removes all records.
  void clear();
  void remove();

 private:
  void cut(int64_t size);

  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

}  // namespace kiln
