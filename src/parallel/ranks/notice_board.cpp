#include "parallel/ranks/notice_board.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/files/sha256.h"

namespace kiln {

namespace {

constexpr size_t kTagBytes = 64;

// Takes as long for any two tags, so that the time tells nothing about them. REQUIRES: equal sizes.
bool are_equal(std::string_view a, std::string_view b) {
  int difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

class SignedBoard : public NoticeBoard {
 public:
  SignedBoard(std::shared_ptr<NoticeBoard> board, std::string secret, std::string job)
      : board_(std::move(board)), secret_(std::move(secret)), job_(std::move(job)) {}

  void set(const std::string& key, const std::string& value) override {
    board_->set(key, tag_of(key, value) + value);
  }
  std::optional<std::string> find(const std::string& key) override {
    const std::optional<std::string> found = board_->find(key);
    if (!found || found->size() < kTagBytes) return std::nullopt;
    std::string value = found->substr(kTagBytes);
    if (!are_equal(std::string_view(*found).substr(0, kTagBytes), tag_of(key, value))) return std::nullopt;
    return value;
  }

 private:
  std::string tag_of(const std::string& key, const std::string& value) const {
    return hmac_sha256(secret_, fmt::format("{}\n{}\n{}", job_, key, value));
  }

  const std::shared_ptr<NoticeBoard> board_;
  const std::string secret_, job_;
};

}  // namespace

std::shared_ptr<NoticeBoard> signed_board(std::shared_ptr<NoticeBoard> board, std::string secret,
                                          std::string job) {
  if (secret.empty()) return board;
  return std::make_shared<SignedBoard>(std::move(board), std::move(secret), std::move(job));
}

std::string random_secret() {
  std::array<unsigned char, 32> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    fail("ranks", "cannot draw a secret: {}", std::strerror(errno));
  std::string text;
  for (const unsigned char byte : bytes) fmt::format_to(std::back_inserter(text), "{:02x}", byte);
  return text;
}

}  // namespace kiln
