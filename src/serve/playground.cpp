#include "serve/playground.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <optional>

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
  for (char& c : text)
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
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
[[noreturn]] void become_sample(char* const* arguments, pid_t parent, int output, int errors) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  for (const int signal : {SIGPIPE, SIGXFSZ, SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);
  ::setpriority(PRIO_PROCESS, 0, 19);
  if (::write(::open("/proc/self/oom_score_adj", O_WRONLY), "1000", 4) < 0) errno = 0;  // only a wish
  if (::dup2(output, STDOUT_FILENO) < 0 || ::dup2(errors, STDERR_FILENO) < 0) ::_exit(1);
  ::close_range(3, ~0U, 0);  // the server's connections are not inherited
  ::execv("/proc/self/exe", arguments);
  ::_exit(127);
}

}  // namespace

Playground::Playground(std::string device, int64_t threads)
    : device_(std::move(device)), threads_(std::to_string(threads)) {}

Playground::~Playground() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    if (child_ > 0) ::kill(child_, SIGKILL);
  }
  if (worker_.joinable()) worker_.join();
}

void Playground::begin(size_t run, const std::string& folder, const nlohmann::json& fields) {
  const std::string classes = text_field(fields, "classes"), prompt = text_field(fields, "prompt");
  const auto seed = number_field<int64_t>(fields, "seed", 0, INT64_MAX);
  const auto guidance = number_field<double>(fields, "guidance", -1000, 1000);
  const auto steps = number_field<int64_t>(fields, "steps", 1, 1000);
  const auto images = number_field<int64_t>(fields, "images", 1, 16);

  const std::lock_guard lock(mutex_);
  if (is_drawing_) fail("serve", "a drawing is under way: wait for its end");
  if (worker_.joinable()) worker_.join();  // it has ended
  Drawing drawing{.id = ++last_id_, .run = run};
  const std::string base = fmt::format("{}/{}", folder_.path().string(), drawing.id);
  std::vector<std::string> options = {"kiln",
                                      "sample",
                                      "--run=" + folder,
                                      "--out=" + base,
                                      "--grid",
                                      "--device=" + device_,
                                      "--threads=" + threads_,
                                      fmt::format("--num-images={}", images.value_or(1)),
                                      fmt::format("--seed={}", seed.value_or(0))};
  if (guidance) options.push_back(fmt::format("--cfg-scale={}", *guidance));
  if (steps) options.push_back(fmt::format("--num-sampling-steps={}", *steps));
  if (!classes.empty()) options.push_back("--classes=" + classes);
  if (!prompt.empty()) {  // in a file, since a text may look like an option
    write_file_atomically("serve", base + ".txt", prompt + "\n");
    options.push_back("--prompts=" + base + ".txt");
  }
  drawing.text =
      fmt::format("{}seed {}{}{}", classes + prompt + (classes.empty() && prompt.empty() ? "" : ", "),
                  seed.value_or(0), guidance ? fmt::format(", guidance {:g}", *guidance) : "",
                  steps ? fmt::format(", {} steps", *steps) : "");
  is_drawing_ = true;
  drawings_.push_front(drawing);
  drawings_.front().text = "drawing: " + drawing.text;
  if (drawings_.size() > kMostDrawings) drawings_.pop_back();
  ++changes_;
  worker_ = std::thread([this, drawing, options] { draw(drawing, options); });
}

void Playground::draw(Drawing drawing, const std::vector<std::string>& options) {
  const std::string base = fmt::format("{}/{}", folder_.path().string(), drawing.id);
  const std::string what = drawing.text;
  try {
    const int status = run_sample(options, base + ".errors");
    if (status != 0) {
      const std::string words = last_words(base + ".errors");
      fail("serve", "{}", words.empty() ? "kiln sample ended without a message: was memory short?" : words);
    }
    drawing.png =
        std::make_shared<const std::string>(read_input("serve", base + "/grid.png", kMostGridBytes));
  } catch (const std::exception& error) {
    drawing.text = fmt::format("not drawn: {}: {}", what, message_of(error));
  }
  std::error_code ignored;
  std::filesystem::remove_all(base, ignored);
  show(drawing);
}

int Playground::run_sample(const std::vector<std::string>& options, const std::string& errors) {
  std::vector<std::string> words = options;
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int to_errors = ::open(errors.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const int to_nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  const pid_t parent = ::getpid();
  pid_t child = -1;
  {
    const std::lock_guard lock(mutex_);
    if (!ends_ && to_errors >= 0 && to_nowhere >= 0) child = child_ = ::fork();
  }
  if (child == 0) become_sample(arguments.data(), parent, to_nowhere, to_errors);
  const int error = errno;
  ::close(to_errors);
  ::close(to_nowhere);
  if (child < 0) fail("serve", "cannot start kiln sample: {}", std::strerror(error));
  siginfo_t ended;
  while (::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) < 0 && errno == EINTR) continue;
  const std::lock_guard lock(mutex_);  // from here on nobody ends it, for its number may soon be another's
  int status = 0;
  ::waitpid(child, &status, 0);
  child_ = 0;
  return status;
}

void Playground::show(const Drawing& drawing) {
  const std::lock_guard lock(mutex_);
  for (Drawing& shown : drawings_)
    if (shown.id == drawing.id) shown = drawing;
  is_drawing_ = false;
  ++changes_;
}

std::vector<Playground::Drawing> Playground::drawings(size_t run) const {
  const std::lock_guard lock(mutex_);
  std::vector<Drawing> found;
  for (const Drawing& drawing : drawings_)
    if (drawing.run == run) found.push_back(drawing);
  return found;
}

int64_t Playground::changes() const {
  const std::lock_guard lock(mutex_);
  return changes_;
}

}  // namespace kiln
