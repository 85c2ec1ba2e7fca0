#include "parallel/ranks/rendezvous.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/command_line.h"
#include "core/error.h"
#include "core/text/some_of.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGrace = std::chrono::seconds(6);  // after a failure, for the others to say what they miss

// Strings in the form that execve() takes.
class Pointers {
 public:
  explicit Pointers(std::vector<std::string> texts) : texts_(std::move(texts)) {
    for (std::string& text : texts_) pointers_.push_back(text.data());
    pointers_.push_back(nullptr);
  }
  Pointers(const Pointers&) = delete;
  char** get() { return pointers_.data(); }

 private:
  std::vector<std::string> texts_;
  std::vector<char*> pointers_;
};

std::vector<std::string> own_arguments() {
  constexpr const char* kPath = "/proc/self/cmdline";
  std::ifstream file(kPath, std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  if (arguments.empty() || !file.eof()) fail("launch", "cannot read {}: {}", kPath, std::strerror(errno));
  return arguments;
}

std::vector<std::string> environment_of(int64_t rank, int64_t num_ranks, int64_t port,
                                        const std::string& secret, int errors_to) {
  const std::array<std::pair<std::string_view, std::string>, 10> ours{
      {{"RANK", fmt::to_string(rank)},
       {"WORLD_SIZE", fmt::to_string(num_ranks)},
       {"LOCAL_RANK", fmt::to_string(rank)},
       {"LOCAL_WORLD_SIZE", fmt::to_string(num_ranks)},
       {"MASTER_ADDR", "127.0.0.1"},
       {"MASTER_PORT", fmt::to_string(port)},
       {"TORCHELASTIC_USE_AGENT_STORE", "True"},  // torchrun's name for a rendezvous that the launcher hosts
       {"TORCHELASTIC_RESTART_COUNT", "0"},
       {"KILN_JOB_SECRET", secret},
       {kErrorDescriptor, fmt::to_string(errors_to)}}};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text = *variable;
    bool replaced = false;
    for (const auto& [name, value] : ours) replaced = replaced || text.substr(0, text.find('=')) == name;
    if (!replaced) variables.emplace_back(text);
  }
  for (const auto& [name, value] : ours) variables.push_back(fmt::format("{}={}", name, value));
  return variables;
}

// Blocks the signals that the launcher waits for, also in the threads that the rendezvous starts.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&blocked_);
    // A shell may have made this process ignore SIGCHLD; then it could not wait for a child.
    signal(SIGCHLD, SIG_DFL);
    for (int signal : {SIGCHLD, SIGINT, SIGTERM}) sigaddset(&blocked_, signal);
    pthread_sigmask(SIG_BLOCK, &blocked_, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;

  const sigset_t& before() const { return before_; }
  // Returns the next signal, or 0 if none came within `seconds`.
  int wait(int64_t seconds) const {
    const timespec timeout{.tv_sec = seconds, .tv_nsec = 0};
    const int signal = sigtimedwait(&blocked_, nullptr, &timeout);
    return signal > 0 ? signal : 0;
  }

 private:
  sigset_t blocked_{}, before_{};
};

std::string ending_text(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

class Launch {
 public:
  explicit Launch(int64_t num_ranks) : num_ranks_(num_ranks) {
    for (int64_t rank = 0; rank < num_ranks; ++rank) start(rank);
  }
  ~Launch() {
    signal_all(SIGKILL);
    for (pid_t& child : children_)
      if (child > 0) waitpid(child, nullptr, 0);
    for (const int end : errors_) ::close(end);
  }
  Launch(const Launch&) = delete;

  void wait() {
    while (num_running() > 0) {
      const int signal = signals_.wait(/*seconds=*/1);
      if (signal == SIGINT || signal == SIGTERM) signal_all(signal);
      reap();
      if (has_failed() && Clock::now() > failed_at_ + kGrace) signal_all(SIGKILL);
    }
    if (has_failed()) fail_as_ranks();
  }

 private:
  void start(int64_t rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
      fail("launch", "cannot start rank {}: {}", rank, std::strerror(errno));
    errors_.push_back(ends[0]);
    Pointers arguments(arguments_),
        environment(environment_of(rank, num_ranks_, rendezvous_.port(), rendezvous_.secret(), ends[1]));
    const pid_t parent = getpid(), child = fork();
    if (child < 0) fail("launch", "cannot start rank {}: {}", rank, std::strerror(errno));
    if (child > 0) {
      children_.push_back(child);
      ::close(ends[1]);
      return;
    }
    // Only async-signal-safe calls here. The child gets a process group of its own, so that the terminal's
    // Ctrl-C reaches it once, through the launcher.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    sigprocmask(SIG_SETMASK, &signals_.before(), nullptr);
    fcntl(ends[1], F_SETFD, 0);  // it stays open in the rank
    execve("/proc/self/exe", arguments.get(), environment.get());
    _exit(127);
  }

  // Returns what a rank that has ended said of its end. Later calls return "".
  std::string told_by(size_t rank) const {
    std::string text(PIPE_BUF, '\0');
    const ssize_t size = ::read(errors_[rank], text.data(), text.size());
    return text.substr(0, static_cast<size_t>(std::max<ssize_t>(size, 0)));
  }

  // Those that only missed the others have nothing to add to what the first one said.
  [[noreturn]] void fail_as_ranks() const {
    const auto first = static_cast<size_t>(first_failure_.rank);
    std::vector<std::string> texts = {told_by(first)};
    std::string of_others;
    for (size_t rank = 0; rank < errors_.size(); ++rank) {
      const std::string text = told_by(rank);
      if (of_others.empty()) of_others = text;
      const bool is_own = rendezvous_.has_reported_failure(static_cast<int64_t>(rank));
      if (is_own && !text.empty() && text != texts.front()) texts.push_back(text);
    }
    if (!texts.front().empty()) throw Error(some_of(texts, "\n"));
    fail("launch", "{}rank {} of {} {}: the others were ended", of_others.empty() ? "" : of_others + "\n",
         first, num_ranks_, ending_text(first_failure_.status));
  }

  // How a rank failed, and how likely it was the first. Ranks that only miss others fail right after the
  // first.
  struct Failure {
    int64_t rank = 0;
    int status = 0;
    int likelihood = 0;
  };

  // Collects the children that have ended since the last call. The system does not say in which order they
  // ended.
  void reap() {
    const bool had_failed = has_failed();
    for (size_t child = 0; child < children_.size(); ++child) {
      Failure failure{.rank = static_cast<int64_t>(child)};
      if (children_[child] == 0 || waitpid(children_[child], &failure.status, WNOHANG) != children_[child])
        continue;
      children_[child] = 0;
      if (WIFEXITED(failure.status) && WEXITSTATUS(failure.status) == 0) continue;
      failure.likelihood = WIFSIGNALED(failure.status) && !had_failed       ? 3
                           : rendezvous_.has_reported_failure(failure.rank) ? 2
                                                                            : 1;
      if (failure.likelihood > first_failure_.likelihood) first_failure_ = failure;
    }
    if (!had_failed && has_failed()) failed_at_ = Clock::now();
  }
  bool has_failed() const { return first_failure_.likelihood > 0; }

  int64_t num_running() const {
    int64_t count = 0;
    for (const pid_t child : children_) count += child > 0;
    return count;
  }
  void signal_all(int signal) const {
    for (const pid_t child : children_)
      if (child > 0) kill(child, signal);
  }

  const int64_t num_ranks_;
  const std::vector<std::string> arguments_ = own_arguments();
  const BlockedSignals signals_;
  const Rendezvous rendezvous_;
  std::vector<pid_t> children_;  // by rank; 0: has ended
  std::vector<int> errors_;      // by rank: where it says why it ends
  Failure first_failure_;
  Clock::time_point failed_at_{};
};

}  // namespace

void launch_ranks(int64_t num_ranks) { Launch(num_ranks).wait(); }

}  // namespace kiln
