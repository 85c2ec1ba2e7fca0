// Reads files whole or in pieces, from many threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"

namespace kiln {

// There is no file of a name, or it is none, like a folder. What cannot be read just now is another Error.
class NoSuchFile : public Error {
 public:
  using Error::Error;
};

class RandomAccessFile {
 public:
  // `who` begins the messages. Throws NoSuchFile, or Error: cannot be opened.
  RandomAccessFile(std::string who, std::string path);
  ~RandomAccessFile();
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // bytes
  // Thread-safe. Throws Error: read error, or the file has fewer bytes.
  std::vector<std::byte> read(int64_t offset, int64_t count) const;

 private:
  std::string who_, path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

std::vector<std::byte> read_file(const std::string& who, const std::string& path);

}  // namespace kiln
