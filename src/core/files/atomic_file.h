// Files and folders that appear whole or not at all. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kiln {

// What is being written for `path`, under a name of its own beside it: PATH.kiln.partial, or
// PATH.kiln-2.partial and so on where that name is taken. It is new: nothing that stands there is written to,
// and no link is followed. It is locked while this lives; what a process left that was killed has no lock,
// and whoever next writes the same path removes it.
class PartialPath {
 public:
  enum class Kind { kFile, kFolder };
  // `who` begins the messages: "[who] cannot write PATH: No space left on device ...". Throws Error.
  PartialPath(std::string who, std::string path, Kind kind);
  // Removes it, with its content, unless commit() was called.
  ~PartialPath();
  PartialPath(const PartialPath&) = delete;
  PartialPath& operator=(const PartialPath&) = delete;

  int fd() const { return fd_; }  // a file's is open for writing
  const std::string& who() const { return who_; }
  const std::string& target() const { return path_; }
  const std::string& partial() const { return partial_; }

  // fsync, rename to `path`, fsync of the folder around it. Throws Error.
  void commit();

 private:
  std::string who_, path_, partial_;
  int fd_ = -1;
  bool is_committed_ = false;
};

// A file that replaces another one of its name, if there is one, when it is complete.
class AtomicFile {
 public:
  // Throws Error, as all of these.
  AtomicFile(std::string who, std::string path);

  // Appends.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  uint64_t size() const { return size_; }  // bytes written so far

  void commit() { partial_.commit(); }

 private:
  PartialPath partial_;
  uint64_t size_ = 0;
};

// A new folder that gets its name when all of it is written. Its files are synced by whoever writes them.
class AtomicFolder {
 public:
  // Throws Error, as commit() does. REQUIRES: `path` has a last part (no trailing slash); commit() finds
  // nothing.
  AtomicFolder(std::string who, std::string path)
      : partial_(std::move(who), std::move(path), PartialPath::Kind::kFolder) {}

  const std::string& folder() const { return partial_.partial(); }  // where to write
  void commit() { partial_.commit(); }

 private:
  PartialPath partial_;
};

// Throws Error: "[who] cannot write PATH: No space left on device: free some space or choose another folder".
[[noreturn]] void fail_with_errno(std::string_view who, std::string_view action, const std::string& path,
                                  int error);

// Appends a text to what `fd`, opened with O_APPEND, is open on: all of it, or on a full disk nothing. Throws
// Error.
void append_whole(int fd, std::string_view who, const std::string& path, std::string_view text);
// Appends a line to a file, which is made if missing and may be no link, and syncs it. A torn last line stays
// a line of its own. Throws Error.
void append_line(std::string_view who, const std::string& path, std::string_view line);

// Writes the whole content at once.
void write_file_atomically(const std::string& who, const std::string& path, std::string_view content);

}  // namespace kiln
