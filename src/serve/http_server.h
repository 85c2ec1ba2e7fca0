// `kiln serve`: pages of runs that grow with them, for browsers of this machine alone.
#pragma once
#include "serve/site.h"

namespace kiln {

// Serves on 127.0.0.1 until SIGINT or SIGTERM, and answers in threads of its own. Prints the address with its
// token. Throws Error: not a run folder, or the port is taken.
//
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
void serve(const ServeOptions& options);

}  // namespace kiln
