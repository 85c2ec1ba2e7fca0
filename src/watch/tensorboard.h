// Writes TensorBoard event files: TFRecord framing around a few protobuf fields. Torch-free.
#pragma once
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>

namespace kiln {

// Returns the CRC-32C (Castagnoli) that TFRecord uses before masking.
uint32_t crc32c(std::span<const uint8_t> bytes);

// Writes one events.out.tfevents.* file. TensorBoard drops entries of earlier files from `first_step` on, so
// a resumed run overwrites the steps after its checkpoint.
class EventWriter {
 public:
  // Throws Error if the file cannot be created.
  EventWriter(const std::string& folder, int64_t first_step);

  void add_scalar(const std::string& tag, double value, int64_t step);
  // `png`: an encoded image.
  void add_image(const std::string& tag, std::span<const uint8_t> png, int64_t height, int64_t width,
                 int64_t step);
  // Throws Error if it cannot write, for example on a full disk.
  void flush();

 private:
  void write_record(const std::string& event);

  struct Close {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<FILE, Close> file_;
};

}  // namespace kiln
