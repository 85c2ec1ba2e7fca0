#include "serve/http_server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <openssl/crypto.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <optional>
#include <semaphore>
#include <thread>

#include "core/error.h"
#include "core/files/input_file.h"
#include "parallel/ranks/notice_board.h"
#include "serve/site.h"
#include "watch/reported_run.h"

namespace kiln {

namespace {

using httplib::Request;
using httplib::Response;
using Handling = httplib::Server::HandlerResponse;

constexpr size_t kMostHeaderBytes = 16384, kMostBodyBytes = 16384, kMostTargetBytes = 512;
constexpr int kNumThreads = 24, kMostWaiting = 64, kMostFeeds = 16;
constexpr const char* kText = "text/plain; charset=utf-8";

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
    if (begin_ == size_) {
      if (!is_readable()) return -1;
      const ssize_t received = ::recv(socket_, buffer_.data(), std::min(buffer_.size(), left_), 0);
      if (received <= 0) return received;
      left_ -= static_cast<size_t>(received);
      begin_ = 0;
      size_ = static_cast<size_t>(received);
    }
    size = std::min(size, size_ - begin_);
    std::copy_n(buffer_.data() + begin_, size, to);
    begin_ += size;
    return static_cast<ssize_t>(size);
  }
  ssize_t write(const char* from, size_t size) override {
    return is_writable() ? ::send(socket_, from, size, MSG_NOSIGNAL) : -1;
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  int socket() const override { return socket_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::duration kPause = std::chrono::seconds(5), kMostTime = std::chrono::seconds(10);

  bool waits_for(short event, Clock::duration time) const {
    pollfd waited{.fd = socket_, .events = event, .revents = 0};
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
    return ms > 0 && ::poll(&waited, 1, static_cast<int>(ms)) > 0;
  }

  const int socket_;
  const Clock::time_point end_ = Clock::now() + kMostTime;
  size_t left_ = kMostHeaderBytes + kMostBodyBytes, begin_ = 0, size_ = 0;
  std::array<char, 4096> buffer_{};
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

// Returns the value of a cookie, or "".
std::string cookie_of(const Request& request, const std::string& name) {
  const std::string cookies = "; " + request.get_header_value("Cookie"), key = "; " + name + "=";
  const size_t found = cookies.find(key);
  if (found == cookies.npos) return "";
  const size_t begin = found + key.size();
  return cookies.substr(begin, cookies.find(';', begin) - begin);
}

// httplib compresses texts that it holds whole, which takes longer than to send them on this machine.
void answer(Response& response, const std::string& type, std::shared_ptr<const std::string> body) {
  response.status = 200;
  response.set_content_provider(body->size(), type,
                                [body](size_t offset, size_t length, httplib::DataSink& sink) {
                                  return sink.write(body->data() + offset, length);
                                });
}
void answer(Response& response, const std::string& type, std::string body) {
  if (body.empty()) body = "\n";
  answer(response, type, std::make_shared<const std::string>(std::move(body)));
}

void refuse(Response& response, int status, const std::string& why) {
  response.status = status;
  response.set_content(why + "\n", kText);
}

void send_to(Response& response, const std::string& path) { response.set_redirect(path, 303); }

}  // namespace

struct HttpServer::Impl {
  Impl(Site& served, int64_t wanted_port) : site(served) {
    server.new_task_queue = [] { return new BoundedPool; };
    server.set_payload_max_length(kMostBodyBytes);
    // Without httplib's SO_REUSEPORT, with which another process could listen on the same port.
    server.set_socket_options([](int socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      ::fcntl(socket, F_SETFD, FD_CLOEXEC);
    });
    server.set_default_headers(
        {{"Content-Security-Policy",
          "default-src 'none'; connect-src 'self'; img-src 'self' data:; style-src 'unsafe-inline'; "
          "script-src "
          "'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
          "require-trusted-types-for 'script'"},
         {"X-Content-Type-Options", "nosniff"},
         {"X-Frame-Options", "DENY"},
         {"Referrer-Policy", "no-referrer"},
         {"Cross-Origin-Resource-Policy", "same-origin"},
         {"Cross-Origin-Opener-Policy", "same-origin"},
         {"Cache-Control", "no-store"}});
    server.set_pre_routing_handler(
        [this](const Request& request, Response& response) { return admit(request, response); });
    server.Get(".*", [this](const Request& request, Response& response) { get(request, response); });
    server.Post(".*", [this](const Request& request, Response& response) { post(request, response); });
    server.set_exception_handler([](const Request&, Response& response, std::exception_ptr error) {
      try {
        std::rethrow_exception(error);
      } catch (const Error& refusal) {
        refuse(response, 400, message_of(refusal));
      } catch (...) {
        refuse(response, 500, "the server failed");
      }
    });
    if (wanted_port == 0)
      port = server.bind_to_any_port("127.0.0.1");
    else if (server.bind_to_port("127.0.0.1", static_cast<int>(wanted_port)))
      port = static_cast<int>(wanted_port);
    if (port <= 0)
      fail("serve",
           "cannot listen on 127.0.0.1:{}: another program may do so; give another --port, or 0 for a "
           "free one",
           wanted_port);
    cookie = fmt::format("kiln-{}", port);
    const std::string of_port = port == 80 ? "" : fmt::format(":{}", port);  // as browsers name it
    names = {"127.0.0.1" + of_port, "localhost" + of_port};
    listener = std::thread([this] { server.listen_after_bind(); });
    while (!server.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Impl() {
    server.stop();
    listener.join();
  }

  // Refuses whatever does not come from the user's own browser, before its body is read.
  Handling admit(const Request& request, Response& response) {
    const auto no = [&](int status, const char* why) {
      refuse(response, status, why);
      return Handling::Handled;
    };
    const std::string host = request.get_header_value("Host"), origin = request.get_header_value("Origin");
    if (host != names[0] && host != names[1]) return no(421, "this server has another name");
    if (request.target.size() > kMostTargetBytes) return no(414, "the address is too long");
    if (request.has_header("Range")) return no(416, "there are no ranges");
    if (request.method != "GET" && request.method != "POST") return no(405, "there are only GET and POST");
    if (request.method == "GET" && request.path == "/" && request.has_param("token")) {
      if (!is_same(request.get_param_value("token"), token)) return no(401, "this is not the token");
      response.set_header("Set-Cookie",
                          fmt::format("{}={}; Path=/; HttpOnly; SameSite=Strict", cookie, token));
      send_to(response, "/");
      return Handling::Handled;
    }
    const bool is_program = is_same(request.get_header_value("X-Kiln-Token"), token);
    if (!is_program && !is_same(cookie_of(request, cookie), token))
      return no(401, "open the address that kiln serve has printed, with its token");
    if (request.method == "GET") return Handling::Unhandled;
    if (site.is_read_only()) return no(403, "this server is for reading only");
    if (origin != "http://" + host && !(is_program && origin.empty()))
      return no(403, "a page of another origin may ask nothing");
    if (!request.has_header("Content-Length") || request.has_header("Transfer-Encoding"))
      return no(411, "how long is the body?");
    return Handling::Unhandled;
  }

  // Takes the number of a run from the front of a path: "/3/draw" leaves "draw".
  std::optional<size_t> take_run(std::string& path) const {
    if (!path.starts_with('/')) return {};
    size_t run = 0;
    const auto [end, error] = std::from_chars(path.data() + 1, path.data() + path.size(), run);
    if (error != std::errc() || end == path.data() + path.size() || *end != '/' || run >= site.num_runs())
      return {};
    path.erase(0, static_cast<size_t>(end + 1 - path.data()));
    return run;
  }

  void get(const Request& request, Response& response) {
    std::string path = request.path;
    if (path == "/" && site.num_runs() == 1) return send_to(response, "/0/");
    if (path == "/") return answer(response, "text/html; charset=utf-8", site.overview().html());
    if (path == "/favicon.ico") return static_cast<void>(response.status = 204);
    if (path == "/events") return feed(site.overview(), request, response);
    const std::optional<size_t> run = take_run(path);
    if (!run) return refuse(response, 404, "there is no such page");
    const PageFeed& page = site.page_of(*run);
    if (path.empty()) return answer(response, "text/html; charset=utf-8", page.html());
    if (path == "events") return feed(page, request, response);
    if (path.starts_with("draws/"))
      if (const auto png = site.drawn(*run, path.substr(6))) return answer(response, "image/png", png);
    if (path.starts_with("samples/"))
      if (const std::string file = page.picture(path.substr(8)); !file.empty())
        return answer(response, "image/png", read_input("serve", file, kMostPictureBytes));
    refuse(response, 404, "there is no such file");
  }

  void post(const Request& request, Response& response) {
    std::string path = request.path;
    const std::optional<size_t> run = take_run(path);
    constexpr std::string_view kRequests = "requests/";
    if (run && path == "draw") return answer(response, kText, site.draw(*run, request.body));
    if (run && path.starts_with(kRequests))
      return answer(response, kText, site.ask(*run, path.substr(kRequests.size())));
    refuse(response, 404, "there is nothing to ask here");
  }

  // Sends what changes on a page until the browser leaves. A browser that lost the connection says what it
  // had.
  void feed(const PageFeed& page, const Request& request, Response& response) {
    if (num_feeds.fetch_add(1) >= kMostFeeds) {
      --num_feeds;
      return refuse(response, 503, "too many pages are open");
    }
    std::string last = request.get_header_value("Last-Event-ID");
    if (last.empty()) last = request.get_param_value("since");
    int64_t since = 0;
    std::from_chars(last.data(), last.data() + last.size(), since);
    response.set_chunked_content_provider(
        "text/event-stream",
        [&page, since](size_t, httplib::DataSink& sink) mutable {
          const std::string events = page.wait_for_events(since, std::chrono::milliseconds(500));
          const std::string_view sent =
              events.empty() ? ":\n\n" : events;  // a comment finds a closed connection
          return sink.write(sent.data(), sent.size());
        },
        [this](bool) { --num_feeds; });
  }

  Site& site;
  const std::string token = random_secret();
  std::string cookie;  // browsers send the cookies of a host to all its ports
  std::array<std::string, 2> names;
  int port = 0;
  std::atomic<int> num_feeds = 0;
  BoundedServer server;
  std::thread listener;
};

HttpServer::HttpServer(Site& site, int64_t port) : impl_(std::make_unique<Impl>(site, port)) {}
HttpServer::~HttpServer() = default;

std::string HttpServer::address() const {
  return fmt::format("http://127.0.0.1:{}/?token={}", impl_->port, impl_->token);
}

}  // namespace kiln
