// Where the ranks leave messages for each other: their rendezvous. Torch-free.
#pragma once
#include <memory>
#include <optional>
#include <string>

namespace kiln {

// Callers make one call at a time. Calls may block, and throw when the rendezvous is gone.
class NoticeBoard {
 public:
  virtual ~NoticeBoard() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;  // does not wait for it to be set
};

// Returns `board` with an HMAC-SHA256 before every value: of the secret, `job` (tells it from others with the
// same secret), the key (which names the rank) and the value. A value without it, or with another one, is not
// found: whoever reaches the rendezvous can write to it, but not in the name of a rank. Without a secret
// returns `board` itself.
std::shared_ptr<NoticeBoard> signed_board(std::shared_ptr<NoticeBoard> board, std::string secret,
                                          std::string job);

// Returns a text that nobody can guess: a secret, or the name of a job. Throws Error.
std::string random_secret();

}  // namespace kiln
