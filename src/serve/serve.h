// `kiln serve`: pages of runs that grow with them, at an address of this machine alone.
#pragma once
#include "serve/site.h"

namespace kiln {

// Serves until SIGINT or SIGTERM. Prints the address with its token. Throws Error: not a run folder, or the
// port is taken.
void serve(const ServeOptions& options);

}  // namespace kiln
