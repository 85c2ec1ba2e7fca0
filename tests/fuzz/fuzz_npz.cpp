// Any bytes as an archive of numpy.savez.
#include "core/error.h"
#include "data/images/npz.h"
#include "fuzz/memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const kiln::test::MemoryFile file(data, size);
  try {
    kiln::read_npz(file.path());
  } catch (const kiln::Error&) {
  }
  return 0;
}
