// The identity of this program, made at build time (cmake/BuildIdentity.cmake).
#pragma once

namespace kiln::cli {

// Returns "0.1.0+7c1e0a94b2d3", the version and a hash of the sources. It is the same for every build of the
// same sources.
const char* build_identity();

}  // namespace kiln::cli
