# cmake -DSOURCE=FOLDER -DVERSION=X.Y.Z -DOUT=FILE.cpp -P BuildIdentity.cmake
# Writes a source file that names this build: the version and a hash of all sources. It stays untouched while they
# are the same, so that one small file is compiled anew, and one program linked, when they change.
set(patterns "")
foreach(extension cpp h cu cuh html)
  list(APPEND patterns "${SOURCE}/src/*.${extension}")
endforeach()
file(GLOB_RECURSE files RELATIVE "${SOURCE}" ${patterns})
list(SORT files)
set(listing "")
foreach(file IN LISTS files)
  file(SHA256 "${SOURCE}/${file}" hash)
  string(APPEND listing "${file} ${hash}\n")
endforeach()
string(SHA256 hash "${listing}")
string(SUBSTRING "${hash}" 0 12 hash)
file(CONFIGURE OUTPUT "${OUT}" CONTENT [[// Made by cmake/BuildIdentity.cmake.
#include "cli/build_identity.h"

namespace kiln::cli {

const char* build_identity() { return "@VERSION@+@hash@"; }

}  // namespace kiln::cli
]] @ONLY)
