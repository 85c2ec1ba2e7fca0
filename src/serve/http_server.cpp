#include "serve/http_server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <openssl/crypto.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <semaphore>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/stop_signal.h"
#include "core/text/split.h"
#include "core/units.h"
#include "parallel/ranks/notice_board.h"
#include "watch/reported_run.h"

namespace kiln {

namespace {

using httplib::Request;
using httplib::Response;
using Handling = httplib::Server::HandlerResponse;
using Clock = std::chrono::steady_clock;

constexpr size_t kMostHeaderBytes = 16384, kMostBodyBytes = 16384, kMostTargetBytes = 512;
constexpr int kNumThreads = 24, kMostWaiting = 64, kMostFeeds = 16;
constexpr const char *kText = "text/plain; charset=utf-8", *kPicture = "image/png";
// The number of a run, unless all runs are meant, and what is asked of it: "/3/draw" is "draw" of run 3.
constexpr const char* kPaths = "(?:/([0-9]{1,9}))?/(.*)";

// Beyond so many connections, the next ones wait to be accepted.
class BoundedPool : public httplib::ThreadPool {
 public:
  BoundedPool() : httplib::ThreadPool(kNumThreads) {}
  void enqueue(std::function<void()> work) override {
    places_.acquire();
    httplib::ThreadPool::enqueue([this, work = std::move(work)] {
      work();
      places_.release();
    });
  }

 private:
  std::counting_semaphore<> places_{kMostWaiting};
};

// A connection, from which one request is read: so many bytes, within so long.
class OneRequest : public httplib::Stream {
 public:
  explicit OneRequest(int socket) : socket_(socket) {}
  bool is_readable() const override {
    return left_ > 0 && waits_for(POLLIN, std::min(kPause, end_ - Clock::now()));
  }
  bool is_writable() const override { return waits_for(POLLOUT, kPause); }
  ssize_t read(char* to, size_t size) override {
    if (unread_.empty()) {
      if (!is_readable()) return -1;
      const ssize_t received = ::recv(socket_, buffer_.data(), std::min(buffer_.size(), left_), 0);
      if (received <= 0) return received;
      unread_ = {buffer_.data(), static_cast<size_t>(received)};
      left_ -= unread_.size();
    }
    size = unread_.copy(to, size);
    unread_.remove_prefix(size);
    return static_cast<ssize_t>(size);
  }
  ssize_t write(const char* from, size_t size) override {
    return is_writable() ? ::send(socket_, from, size, MSG_NOSIGNAL) : -1;
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  int socket() const override { return socket_; }

 private:
  static constexpr Clock::duration kPause = std::chrono::seconds(5), kMostTime = std::chrono::seconds(10);

  bool waits_for(short event, Clock::duration time) const {
    pollfd waited{.fd = socket_, .events = event, .revents = 0};
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
    return ms > 0 && ::poll(&waited, 1, static_cast<int>(ms)) > 0;
  }

  const int socket_;
  const Clock::time_point end_ = Clock::now() + kMostTime;
  size_t left_ = kMostHeaderBytes + kMostBodyBytes;
  std::array<char, 4096> buffer_{};
  std::string_view unread_;  // what httplib has not taken from the buffer
};

// httplib waits five seconds for each byte of a header, of any length.
class BoundedServer : public httplib::Server {
  bool process_and_close_socket(int socket) override {
    OneRequest request(socket);
    bool is_closed = false;
    const bool is_answered = process_request(request, /*close_connection=*/true, is_closed, nullptr);
    ::shutdown(socket, SHUT_RDWR);
    ::close(socket);
    return is_answered;
  }
};

// Takes as long for any text of this length.
bool is_same(const std::string& one, const std::string& other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

void refuse(Response& response, int status, const std::string& why) {
  response.status = status;
  response.set_content(why + "\n", kText);
}

class HttpServer {
 public:
  // Listens and answers. Port 0: a free one. Throws Error: the port is taken. REQUIRES: `site` outlives this.
  HttpServer(Site& site, int64_t wanted_port) : site_(site) {
    server_.new_task_queue = [] { return new BoundedPool; };
    server_.set_payload_max_length(kMostBodyBytes);
    // Without httplib's SO_REUSEPORT, with which another process could listen on the same port.
    server_.set_socket_options([](int socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      ::fcntl(socket, F_SETFD, FD_CLOEXEC);
    });
    server_.set_default_headers(
        {{"Content-Security-Policy",
          "default-src 'none'; connect-src 'self'; img-src 'self' data:; style-src 'unsafe-inline'; "
          "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
          "require-trusted-types-for 'script'"},
         {"X-Content-Type-Options", "nosniff"},
         {"X-Frame-Options", "DENY"},
         {"Referrer-Policy", "no-referrer"},
         {"Cross-Origin-Resource-Policy", "same-origin"},
         {"Cross-Origin-Opener-Policy", "same-origin"},
         {"Cache-Control", "no-store"}});
    server_.set_pre_routing_handler(
        [this](const Request& request, Response& response) { return admit(request, response); });
    server_.Get(kPaths, [this](const Request& request, Response& response) { get(request, response); });
    server_.Post(kPaths, [this](const Request& request, Response& response) { post(request, response); });
    server_.set_exception_handler([](const Request&, Response& response, std::exception_ptr error) {
      try {
        std::rethrow_exception(error);
      } catch (const Error& refusal) {
        refuse(response, 400, message_of(refusal));
      } catch (...) {
        refuse(response, 500, "the server failed");
      }
    });
    if (wanted_port == 0)
      port_ = server_.bind_to_any_port("127.0.0.1");
    else if (server_.bind_to_port("127.0.0.1", static_cast<int>(wanted_port)))
      port_ = static_cast<int>(wanted_port);
    if (port_ <= 0)
      fail("serve",
           "cannot listen on 127.0.0.1:{}: another program may do so; give another --port, or 0 for a "
           "free one",
           wanted_port);
    cookie_ = fmt::format("kiln-{}={}", port_, token_);
    const std::string of_port = port_ == 80 ? "" : fmt::format(":{}", port_);  // as browsers name it
    names_ = {"127.0.0.1" + of_port, "localhost" + of_port};
    listener_ = std::jthread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~HttpServer() { server_.stop(); }  // ends all connections
  HttpServer(const HttpServer&) = delete;

  std::string address() const { return fmt::format("http://127.0.0.1:{}/?token={}", port_, token_); }

 private:
  // Refuses whatever does not come from the user's own browser, before its body is read.
  Handling admit(const Request& request, Response& response) const {
    const auto no = [&](int status, const char* why) {
      refuse(response, status, why);
      return Handling::Handled;
    };
    const std::string host = request.get_header_value("Host"), origin = request.get_header_value("Origin");
    if (host != names_[0] && host != names_[1]) return no(421, "this server has another name");
    if (request.target.size() > kMostTargetBytes) return no(414, "the address is too long");
    if (request.has_header("Range")) return no(416, "there are no ranges");
    if (request.method != "GET" && request.method != "POST") return no(405, "there are only GET and POST");
    if (request.method == "GET" && request.path == "/" && request.has_param("token")) {
      if (!is_same(request.get_param_value("token"), token_)) return no(401, "this is not the token");
      response.set_header("Set-Cookie", cookie_ + "; Path=/; HttpOnly; SameSite=Strict");
      response.set_redirect("/", 303);
      return Handling::Handled;
    }
    const bool is_program = is_same(request.get_header_value("X-Kiln-Token"), token_);
    const std::vector<std::string> cookies = split(request.get_header_value("Cookie"), ';');
    const auto is_ours = [&](const std::string& cookie) { return is_same(cookie, cookie_); };
    if (!is_program && std::ranges::none_of(cookies, is_ours))
      return no(401, "open the address that kiln serve has printed, with its token");
    if (request.method == "GET") return Handling::Unhandled;
    if (site_.is_read_only()) return no(403, "this server is for reading only");
    if (origin != "http://" + host && !(is_program && origin.empty()))
      return no(403, "a page of another origin may ask nothing");
    if (!request.has_header("Content-Length") || request.has_header("Transfer-Encoding"))
      return no(411, "how long is the body?");
    return Handling::Unhandled;
  }

  void get(const Request& request, Response& response) {
    const std::optional<int64_t> run = whole_number(request.matches[1].str());
    const std::string name = request.matches[2];
    if (!run && name == "favicon.ico") return static_cast<void>(response.status = 204);
    if (!run && name.empty() && site_.num_runs() == 1) return response.set_redirect("/0/", 303);
    const bool is_page = run ? *run < site_.num_runs() : name.empty() || name == "events";
    if (!is_page) return refuse(response, 404, "there is no such page");
    const PageFeed& page = run ? site_.page_of(*run) : site_.overview();
    if (name.empty()) return send_page(response, page);
    if (name == "events") return feed(request, response, page);
    if (name.starts_with("draws/"))
      if (const auto png = site_.drawn(*run, name.substr(6))) return response.set_content(*png, kPicture);
    if (name.starts_with("samples/"))
      if (const std::string file = page.picture(name.substr(8)); !file.empty())
        return response.set_content(read_input("serve", file, kMostPictureBytes), kPicture);
    refuse(response, 404, "there is no such file");
  }

  void post(const Request& request, Response& response) {
    constexpr std::string_view kRequests = "requests/";
    const std::optional<int64_t> run = whole_number(request.matches[1].str());
    const std::string name = request.matches[2];
    const bool is_of_run = run && *run < site_.num_runs();
    if (is_of_run && name == "draw") return response.set_content(site_.draw(*run, request.body), kText);
    if (is_of_run && name.starts_with(kRequests))
      return response.set_content(site_.ask(*run, name.substr(kRequests.size())), kText);
    refuse(response, 404, "there is nothing to ask here");
  }

  // httplib would compress a text that it holds whole, which takes longer than to send it on this machine.
  static void send_page(Response& response, const PageFeed& page) {
    const auto html = std::make_shared<const std::string>(page.html());
    response.set_content_provider(html->size(), "text/html; charset=utf-8",
                                  [html](size_t offset, size_t length, httplib::DataSink& sink) {
                                    return sink.write(html->data() + offset, length);
                                  });
  }

  // Sends what changes on a page until the browser leaves. A browser that lost the connection says what it
  // had.
  void feed(const Request& request, Response& response, const PageFeed& page) {
    if (!feeds_.try_acquire()) return refuse(response, 503, "too many pages are open");
    const std::string last = request.get_header_value("Last-Event-ID");
    int64_t since = whole_number(last.empty() ? request.get_param_value("since") : last).value_or(0);
    response.set_chunked_content_provider(
        "text/event-stream",
        [&page, since](size_t, httplib::DataSink& sink) mutable {
          std::string events = page.wait_for_events(since, std::chrono::milliseconds(500));
          if (events.empty()) events = ":\n\n";  // a comment finds a closed connection
          return sink.write(events.data(), events.size());
        },
        [this](bool) { feeds_.release(); });
  }

  Site& site_;
  const std::string token_ = random_secret();
  std::string cookie_;  // with the port in its name: browsers send the cookies of a host to all its ports
  std::array<std::string, 2> names_;
  int port_ = 0;
  std::counting_semaphore<> feeds_{kMostFeeds};
  BoundedServer server_;
  std::jthread listener_;
};

}  // namespace

void serve(const ServeOptions& options) {
  constexpr auto kOften = std::chrono::milliseconds(1000), kSoon = std::chrono::milliseconds(50);
  if (options.port < 0 || options.port > 65535)
    fail("serve", "expected --port to be from 0 to 65535, got {}", options.port);
  const StopSignal stop;
  Site site(options);
  Clock::time_point begin = Clock::now();
  bool has_more = site.update();
  const HttpServer server(site, options.port);
  fmt::print("{}\n", server.address());
  std::fflush(stdout);
  while (!stop.requested()) {
    // Reading takes a tenth of a processor at most, once the logs are read up to their ends.
    const auto next =
        has_more ? begin : begin + std::max<Clock::duration>(kOften, 10 * (Clock::now() - begin));
    while (!stop.requested() && Clock::now() < next) std::this_thread::sleep_for(kSoon);
    begin = Clock::now();
    has_more = site.update();
  }
}

}  // namespace kiln
