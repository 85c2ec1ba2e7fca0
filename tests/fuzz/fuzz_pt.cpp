// libFuzzer target: any bytes as a .pt file, and any bytes as the pickle of a well-formed one, so that the
// fuzzer need not learn the archive's checksums first.
#include <cstdint>

#include "checkpoint/pickle_builder.h"
#include "checkpoint/weights_file.h"
#include "core/error.h"

namespace {

void parse(const std::string& file) {
  try {
    const auto parsed = kiln::parse_pt(std::as_bytes(std::span(file.data(), file.size())), "fuzz");
    unsigned sum = 0;
    for (const auto& [name, view] : parsed->tensors())
      for (const std::byte value : view.bytes) sum += static_cast<unsigned>(value);
    volatile unsigned sink = sum;
    static_cast<void>(sink);
  } catch (const kiln::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  parse(bytes);
  const std::string storage(4096, '\1');
  parse(kiln::test::zip_archive({{"a/data.pkl", bytes}, {"a/data/0", storage}, {"a/data/1", storage}}));
  return 0;
}
