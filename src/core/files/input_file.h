// Opens files that others wrote, and reads them whole or in pieces. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace kiln {

// There is no file of a name, or it is none, like a folder or a pipe. What cannot be read just now is another
// Error.
class NoSuchFile : public Error {
 public:
  using Error::Error;
};

// Returns a descriptor of a regular file, to read. It waits for nobody who would write into a pipe, and
// programs that are started do not inherit it. `who` begins the messages. Throws NoSuchFile, or Error.
int open_input(std::string_view who, const std::string& path);
// Returns the content. Throws Error too if it has more than `most_bytes`.
std::string read_input(std::string_view who, const std::string& path, size_t most_bytes);

class RandomAccessFile {
 public:
  // Throws as open_input().
  RandomAccessFile(std::string who, std::string path);
  ~RandomAccessFile();
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  int64_t size() const { return size_; }  // bytes
  // Thread-safe. Throws Error: read error, or the file has fewer bytes.
  std::vector<std::byte> read(int64_t offset, int64_t count) const;
  void read(int64_t offset, std::span<std::byte> to) const;

 private:
  void check(int64_t offset, int64_t count) const;

  std::string who_, path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

std::vector<std::byte> read_file(const std::string& who, const std::string& path);

// Reads a file line by line. Unlike a stream, it does not take what cannot be read for the end.
class LineReader {
 public:
  // Throws as open_input().
  LineReader(std::string who, std::string path) : file_(std::move(who), std::move(path)) {}

  // Reads the next line, without its end. Returns false after the last one. Throws Error: read error.
  bool next(std::string& line);
  // False if the line that was read last has no end: its writer was killed, or the file just ends so.
  bool is_whole() const { return is_whole_; }

 private:
  RandomAccessFile file_;
  int64_t offset_ = 0;  // of what follows the block
  std::string block_;
  size_t begin_ = 0;  // of the next line in the block
  bool is_whole_ = true;
};

}  // namespace kiln
