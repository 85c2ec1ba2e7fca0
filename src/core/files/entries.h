// The entries of a folder for range-for. Errors of std::filesystem's own iterators do not name the folder.
#pragma once
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace kiln {

template <class Iterator>
class Entries {
 public:
  // Throws Error that names the folder where an entry cannot be read, if `throws`; else ends there.
  Entries(std::filesystem::path folder, std::filesystem::directory_options options, bool throws)
      : folder_(std::move(folder)), throws_(throws) {
    std::error_code error;
    at_ = Iterator(folder_, options, error);
    check(error);
  }

  class Position {
   public:
    explicit Position(Entries& entries) : entries_(&entries) {}
    const std::filesystem::directory_entry& operator*() const { return *entries_->at_; }
    Position& operator++() {
      std::error_code error;
      entries_->at_.increment(error);
      entries_->check(error);
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return entries_->at_ == Iterator(); }

   private:
    Entries* entries_;
  };
  Position begin() { return Position(*this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  void check(const std::error_code& error) const {
    if (error && throws_) fail("folder", "cannot list {}: {}", folder_.string(), error.message());
  }

  std::filesystem::path folder_;
  bool throws_;
  Iterator at_;
};

inline Entries<std::filesystem::directory_iterator> entries_of(const std::filesystem::path& folder) {
  return {folder, std::filesystem::directory_options::none, /*throws=*/true};
}
// As many as can be read: none of a folder that is not there.
inline Entries<std::filesystem::directory_iterator> readable_entries_of(const std::filesystem::path& folder) {
  return {folder, std::filesystem::directory_options::none, /*throws=*/false};
}
// Those of its folders too.
inline Entries<std::filesystem::recursive_directory_iterator> entries_below(
    const std::filesystem::path& folder,
    std::filesystem::directory_options options = std::filesystem::directory_options::none) {
  return {folder, options, /*throws=*/true};
}

}  // namespace kiln
