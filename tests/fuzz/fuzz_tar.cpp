// Any bytes as a tar of pictures: its index is made and its pictures are read.
#include "core/error.h"
#include "data/images/dataset_layouts.h"
#include "fuzz/memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const kiln::test::MemoryFile file(data, size);
  try {
    const auto dataset = kiln::layouts::open_webdataset("fuzz", {file.path()});
    for (size_t i = 0; i < dataset->records().size(); ++i) {
      const kiln::PictureBytes bytes = dataset->bytes(static_cast<int64_t>(i));
      bytes.read(0, bytes.size);
    }
  } catch (const kiln::Error&) {
  }
  return 0;
}
