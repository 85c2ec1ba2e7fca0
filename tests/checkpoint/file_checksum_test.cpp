#include "checkpoint/file_checksum.h"

#include <algorithm>
#include <random>
#include <stdexcept>

#include "core/json.h"
#include "test_files.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kiln {
namespace {

std::span<const std::byte> as_byte_span(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string random_text(size_t size) {
  std::mt19937 random(size);
  std::string text(size, ' ');
  for (char& character : text) character = static_cast<char>(random());
  return text;
}

std::string checksum_of(const std::string& text) {
  FileChecksum checksum;
  checksum.add(0, as_byte_span(text));
  return checksum.of_file(text.size()).value();
}

// docs/checkpoints.md
TEST(FileChecksums, AreWhatTheFormatSays) {
  EXPECT_EQ(checksum_of(""), "0000000000000000");
  for (const size_t size : {4, 64, 1000}) {
    const std::string text = random_text(size);
    uint64_t sum = 0;
    for (size_t block = 0; block * 64 < size; ++block)
      sum += XXH3_64bits_withSeed(text.data() + block * 64, std::min<size_t>(64, size - block * 64), block);
    EXPECT_EQ(checksum_of(text), fmt::format("{:016x}", sum));
  }
}

TEST(FileChecksums, AreTheSameHoweverAFileWasDivided) {
  std::mt19937 random(1);
  for (const size_t size : {1, 63, 64, 65, 128, 1000, 5000}) {
    const std::string text = random_text(size);
    const std::string expected = checksum_of(text);
    for (int attempt = 0; attempt < 20; ++attempt) {
      std::vector<size_t> cuts = {0, size};
      for (int cut = 0; cut < 9; ++cut) cuts.push_back(random() % (size + 1));
      std::ranges::sort(cuts);
      std::vector<size_t> order(cuts.size() - 1);
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::ranges::shuffle(order, random);
      std::vector<FileChecksum> processes(3);
      for (const size_t part : order)
        processes[random() % 3].add(cuts[part],
                                    as_byte_span(text).subspan(cuts[part], cuts[part + 1] - cuts[part]));
      FileChecksum all;
      for (const FileChecksum& mine : processes)
        all.merge(nlohmann::json::parse(nlohmann::json(mine).dump()).get<FileChecksum>());
      EXPECT_EQ(all.of_file(size), expected) << size;
    }
  }
}

TEST(FileChecksums, ChangeWithEveryByteAndItsPlace) {
  const std::string text = random_text(300);
  const std::string expected = checksum_of(text);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string flipped = text;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    EXPECT_NE(checksum_of(flipped), expected) << i;
  }
  const std::string swapped = text.substr(64, 64) + text.substr(0, 64) + text.substr(128);
  EXPECT_NE(checksum_of(swapped), expected);
  for (const size_t zeros : {1, 44, 172})
    EXPECT_NE(checksum_of(text.substr(0, 300 - zeros) + std::string(zeros, '\0')), expected);
}

TEST(FileChecksums, AreOfAllBytesOnce) {
  const std::string text = random_text(100);
  for (const auto& [begin, count] : {std::pair{0, 64}, {0, 99}, {1, 99}, {64, 36}}) {
    FileChecksum checksum;
    checksum.add(static_cast<uint64_t>(begin), as_byte_span(text).subspan(begin, count));
    EXPECT_EQ(checksum.of_file(100), std::nullopt) << begin;
  }
  FileChecksum checksum;
  checksum.add(0, as_byte_span(text).first(10));
  EXPECT_THROW(checksum.add(9, as_byte_span(text).first(10)), std::logic_error);
}

TEST(FileChecksums, ReadAFileInParts) {
  const test::TempFolder folder;
  const std::string text = random_text((2 << 20) + 1234), path = folder / "file";
  test::write_bytes(path, text);
  FileChecksum checksum = checksum_of_bytes(path, 0, 1'000'001);
  checksum.merge(checksum_of_bytes(path, 1'000'001, text.size()));
  EXPECT_EQ(checksum.of_file(text.size()), checksum_of(text));
  // Cut off behind our back.
  EXPECT_ERROR(checksum_of_bytes(path, 0, text.size() + 1), "has fewer than the");
  EXPECT_ERROR(checksum_of_bytes(folder / "absent", 0, 1), "absent: No such file");
}

}  // namespace
}  // namespace kiln
