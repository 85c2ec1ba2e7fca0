#include "watch/tensorboard.h"

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/error.h"

namespace kiln {

namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0x82F63B78u : 0);
    table[i] = value;
  }
  return table;
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

template <class T>
void append_little_endian(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Protobuf wire format: a field is (number << 3 | wire type), then its value.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}
void append_tag(std::string& out, int field, WireType type) {
  append_varint(out, static_cast<uint64_t>(field) << 3 | type);
}
void append_int(std::string& out, int field, int64_t value) {
  append_tag(out, field, kVarint);
  append_varint(out, static_cast<uint64_t>(value));
}
void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out.append(bytes);
}

// tensorflow/core/util/event.proto: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7.
std::string make_event(int64_t step) {
  std::string event;
  append_tag(event, 1, kFixed64);
  append_little_endian(event, wall_time());
  append_int(event, 2, step);
  return event;
}

// tensorflow/core/framework/summary.proto: Summary.value = 1; Value.tag = 1.
std::string make_summary_event(int64_t step, const std::string& tag, std::string_view rest_of_value) {
  std::string value, summary, event = make_event(step);
  append_bytes(value, 1, tag);
  value += rest_of_value;
  append_bytes(summary, 1, value);
  append_bytes(event, 5, summary);
  return event;
}

uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  return std::rotr(crc, 15) + 0xA282EAD8u;
}

}  // namespace

uint32_t crc32c(std::span<const uint8_t> bytes) {
  static constexpr std::array<uint32_t, 256> kTable = make_crc_table();
  uint32_t crc = ~0u;
  for (uint8_t byte : bytes) crc = kTable[(crc ^ byte) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

EventWriter::EventWriter(const std::string& folder, int64_t first_step) {
  // TensorBoard reads a folder's files in the order of their names. The name has seconds, then a counter for
  // quick restarts.
  for (int i = 0; !file_; ++i) {
    path_ =
        fmt::format("{}/events.out.tfevents.{:010}.{}.kiln", folder, static_cast<int64_t>(wall_time()), i);
    file_.reset(std::fopen(path_.c_str(), "wbx"));
    if (!file_ && errno != EEXIST) fail("tensorboard", "cannot create {}: {}", path_, std::strerror(errno));
  }
  std::string version = make_event(0), start = make_event(first_step), status;
  append_bytes(version, 3, "brain.Event:2");
  write_record(version);
  append_int(status, 1, 1);  // SessionLog.status = START
  append_bytes(start, 7, status);
  write_record(start);
  flush();
}

void EventWriter::add_scalar(const std::string& tag, double value, int64_t step) {
  std::string rest;
  append_tag(rest, 2, kFixed32);  // Value.simple_value
  append_little_endian(rest, static_cast<float>(value));
  write_record(make_summary_event(step, tag, rest));
}

void EventWriter::add_image(const std::string& tag, std::span<const uint8_t> png, int64_t height,
                            int64_t width, int64_t step) {
  std::string image, rest;
  append_int(image, 1, height);
  append_int(image, 2, width);
  append_int(image, 3, 3);  // RGB
  append_bytes(image, 4, {reinterpret_cast<const char*>(png.data()), png.size()});
  append_bytes(rest, 4, image);  // Value.image
  write_record(make_summary_event(step, tag, rest));
}

// TFRecord: length, masked CRC of the length, data, masked CRC of the data.
void EventWriter::write_record(const std::string& event) {
  std::string length, record;
  append_little_endian(length, static_cast<uint64_t>(event.size()));
  record = length;
  append_little_endian(record, masked_crc(length));
  record += event;
  append_little_endian(record, masked_crc(event));
  std::fwrite(record.data(), 1, record.size(), file_.get());
}

void EventWriter::flush() {
  if (std::fflush(file_.get()) != 0 || std::ferror(file_.get()))
    fail("tensorboard", "cannot write {}: {}", path_, std::strerror(errno));
}

}  // namespace kiln
