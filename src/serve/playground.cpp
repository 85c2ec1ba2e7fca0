#include "serve/playground.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/input_file.h"

namespace kiln {

namespace {

constexpr size_t kMostDrawings = 8, kMostTextBytes = 2000;
constexpr size_t kMostGridBytes = size_t{64} << 20;

std::string text_field(const nlohmann::json& fields, const char* name) {
  const nlohmann::json value = fields.is_object() ? fields.value(name, nlohmann::json("")) : nlohmann::json();
  if (!value.is_string() || value.get_ref<const std::string&>().size() > kMostTextBytes)
    fail("serve", "expected {} to be a text of at most {} bytes", name, kMostTextBytes);
  std::string text = value.get<std::string>();
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

// Returns a number that is nothing but that, or nothing for "".
template <class Number>
std::optional<Number> number_field(const nlohmann::json& fields, const char* name, Number least,
                                   Number most) {
  const std::string text = text_field(fields, name);
  if (text.empty()) return std::nullopt;
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || !(number >= least && number <= most))
    fail("serve", "expected {} to be a number from {} to {}, got {:.40}", name, least, most, text);
  return number;
}

// The end of what a program said.
std::string last_words(const std::string& path) {
  constexpr size_t kMostWords = 600;
  std::string text = read_input("serve", path, kMostGridBytes);
  while (text.ends_with('\n')) text.pop_back();
  return text.size() > kMostWords ? "..." + text.substr(text.size() - kMostWords) : text;
}

// In the child of a process with threads: async-signal-safe calls only.
[[noreturn]] void become_sample(char* const* arguments, pid_t parent, int errors) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  for (const int signal : {SIGPIPE, SIGXFSZ, SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);
  ::setpriority(PRIO_PROCESS, 0, 19);
  if (::write(::open("/proc/self/oom_score_adj", O_WRONLY), "1000", 4) < 0) errno = 0;  // only a wish
  const int nowhere = ::open("/dev/null", O_WRONLY);
  if (::dup2(nowhere, STDOUT_FILENO) < 0 || ::dup2(errors, STDERR_FILENO) < 0) ::_exit(1);
  ::close_range(3, ~0U, 0);  // the server's connections are not inherited
  ::execv("/proc/self/exe", arguments);
  ::_exit(127);
}

// Runs kiln sample, which is ended when `stop` says so, and returns its status.
int run_sample(std::vector<std::string> words, const std::string& errors, const std::stop_token& stop) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int to_errors = ::open(errors.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const pid_t parent = ::getpid(), child = to_errors < 0 ? -1 : ::fork();
  if (child == 0) become_sample(arguments.data(), parent, to_errors);
  const int error = errno;
  ::close(to_errors);
  if (child < 0) fail("serve", "cannot start kiln sample: {}", std::strerror(error));
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (stop.stop_requested()) ::kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return status;
}

}  // namespace

void Playground::begin(int64_t run, const std::string& folder, const nlohmann::json& fields) {
  const std::string classes = text_field(fields, "classes"), prompt = text_field(fields, "prompt");
  const int64_t seed = number_field<int64_t>(fields, "seed", 0, INT64_MAX).value_or(0);
  const auto guidance = number_field<double>(fields, "guidance", -1000, 1000);
  const auto steps = number_field<int64_t>(fields, "steps", 1, 1000);
  const int64_t images = number_field<int64_t>(fields, "images", 1, 16).value_or(1);

  const std::lock_guard lock(mutex_);
  if (is_drawing_) fail("serve", "a drawing is under way: wait for its end");
  Drawing drawing{.id = ++last_id_, .run = run};
  const std::string base = fmt::format("{}/{}", folder_.path().string(), drawing.id);
  std::vector<std::string> options = {"kiln",
                                      "sample",
                                      "--run=" + folder,
                                      "--out=" + base,
                                      "--grid",
                                      "--device=" + device_,
                                      fmt::format("--threads={}", threads_),
                                      fmt::format("--num-images={}", images),
                                      fmt::format("--seed={}", seed)};
  if (guidance) options.push_back(fmt::format("--cfg-scale={}", *guidance));
  if (steps) options.push_back(fmt::format("--num-sampling-steps={}", *steps));
  if (!classes.empty()) options.push_back("--classes=" + classes);
  if (!prompt.empty()) {  // in a file, since a text may look like an option
    write_file_atomically("serve", base + ".txt", prompt + "\n");
    options.push_back("--prompts=" + base + ".txt");
  }
  const std::string what = classes + prompt;
  drawing.text = fmt::format("{}{}seed {}{}{}", what, what.empty() ? "" : ", ", seed,
                             guidance ? fmt::format(", guidance {:g}", *guidance) : "",
                             steps ? fmt::format(", {} steps", *steps) : "");
  worker_ = std::jthread(
      [this, drawing, base, options](const std::stop_token& stop) { draw(drawing, base, options, stop); });
  is_drawing_ = has_changed_ = true;
  drawing.text = "drawing: " + drawing.text;
  drawings_.push_front(drawing);
  if (drawings_.size() > kMostDrawings) drawings_.pop_back();
}

void Playground::draw(Drawing drawing, const std::string& base, const std::vector<std::string>& options,
                      const std::stop_token& stop) {
  try {
    if (run_sample(options, base + ".errors", stop) != 0) {
      const std::string words = last_words(base + ".errors");
      fail("serve", "{}", words.empty() ? "kiln sample ended without a message: was memory short?" : words);
    }
    drawing.png =
        std::make_shared<const std::string>(read_input("serve", base + "/grid.png", kMostGridBytes));
  } catch (const std::exception& error) {
    drawing.text = fmt::format("not drawn: {}: {}", drawing.text, message_of(error));
  }
  std::error_code ignored;
  std::filesystem::remove_all(base, ignored);
  const std::lock_guard lock(mutex_);
  drawings_.front() = std::move(drawing);  // no other one has begun since
  is_drawing_ = false;
  has_changed_ = true;
}

std::vector<Playground::Drawing> Playground::drawings(int64_t run) const {
  const std::lock_guard lock(mutex_);
  std::vector<Drawing> found;
  for (const Drawing& drawing : drawings_)
    if (drawing.run == run) found.push_back(drawing);
  return found;
}

}  // namespace kiln
