// Answers browsers of this machine: who may ask, and what each address is.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace kiln {

class Site;

// Every answer needs the token, in a cookie that GET /?token=TOKEN sets or in the header X-Kiln-Token, and
// the server's own name in Host. A POST from a page needs the server's own origin. Nothing that a request
// says is a path of a file: names are looked up among those of the page.
//
//   GET /              the page of several runs, or the way to the only one
//   GET /N/            the page of run N, below which are
//     GET events         its changes, as server-sent events
//     GET samples/NAME   a grid of the page
//     GET draws/ID.png   what was drawn
//     POST requests/NAME asks the run (watch/run_requests.h)
//     POST draw          draws, with JSON of texts (Playground::begin)
class HttpServer {
 public:
  // Listens on 127.0.0.1 and answers in threads of its own. Port 0: a free one. Throws Error: the port is
  // taken. REQUIRES: `site` outlives this.
  HttpServer(Site& site, int64_t port);
  ~HttpServer();  // ends all connections
  HttpServer(const HttpServer&) = delete;

  std::string address() const;  // with the token

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kiln
