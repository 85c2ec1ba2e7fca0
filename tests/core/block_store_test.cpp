// Memory on a disk: every way there brings back what was written, and says what went wrong.
#include "core/files/block_store.h"

#include <cstring>

#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;

constexpr int64_t kBlock = 8192;

// Aligned as transfers want it.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(
            static_cast<std::byte*>(std::aligned_alloc(BlockStore::kAlignment, static_cast<size_t>(bytes)))),
        bytes_(bytes) {}
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;

  Buffer& fill(int seed) {
    for (int64_t i = 0; i < bytes_; ++i) data_[i] = static_cast<std::byte>((i * 31 + i / 512 + seed) & 0xff);
    return *this;
  }
  std::span<std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }
  bool operator==(const Buffer& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, static_cast<size_t>(bytes_)) == 0;
  }

 private:
  std::byte* data_;
  int64_t bytes_;
};

class BlockStores : public ::testing::TestWithParam<std::pair<bool, bool>> {
 protected:
  BlockStoreOptions options() const {
    return {.folder = ::testing::TempDir(),
            .queue_depth = 4,
            .block_bytes = kBlock,
            .use_io_uring = GetParam().first,
            .bypass_page_cache = GetParam().second};
  }
};

// More requests than the queue is deep, a last one that is short, and several transfers under way.
TEST_P(BlockStores, BringsBackWhatWasWritten) {
  constexpr int64_t kBytes = 37 * 4096, kParts = 5;
  BlockStore store(kParts * kBytes, options());
  std::vector<std::unique_ptr<Buffer>> written, read;
  std::vector<BlockTransfer> transfers;
  for (int64_t part = 0; part < kParts; ++part) {
    written.push_back(std::make_unique<Buffer>(kBytes));
    written.back()->fill(static_cast<int>(part));
    transfers.push_back(store.write(written.back()->span(), part * kBytes));
  }
  for (BlockTransfer& transfer : transfers) transfer.wait();
  transfers.clear();
  for (int64_t part = 0; part < kParts; ++part) {
    read.push_back(std::make_unique<Buffer>(kBytes));
    transfers.push_back(store.read(read.back()->span(), part * kBytes));
  }
  for (size_t part = 0; part < kParts; ++part) {
    transfers[part].wait();
    EXPECT_TRUE(*read[part] == *written[part]) << part;
  }
  EXPECT_EQ(store.bytes_written(), kParts * kBytes);
  EXPECT_EQ(store.bytes_read(), kParts * kBytes);
}

TEST_P(BlockStores, StartsAsZeros) {
  BlockStore store(2 * kBlock, options());
  Buffer buffer(2 * kBlock), zeros(2 * kBlock);
  std::memset(zeros.span().data(), 0, 2 * kBlock);
  store.read(buffer.fill(1).span(), 0).wait();
  EXPECT_TRUE(buffer == zeros);
}

TEST_P(BlockStores, AnAbandonedTransferIsWaitedFor) {
  BlockStore store(64 * kBlock, options());
  for (int round = 0; round < 8; ++round) {
    Buffer buffer(64 * kBlock);
    store.write(buffer.fill(round).span(), 0);  // the buffer goes right after it
  }
  Buffer expected(64 * kBlock), buffer(64 * kBlock);
  store.read(buffer.span(), 0).wait();
  EXPECT_TRUE(buffer == expected.fill(7));
}

TEST_P(BlockStores, AFileThatWasCutIsAnError) {
  BlockStore store(16 * kBlock, options());
  ASSERT_EQ(ftruncate(test::descriptor_of_store(), 3 * kBlock + 512), 0);
  Buffer buffer(16 * kBlock);
  EXPECT_THAT([&] { store.read(buffer.span(), 0).wait(); },
              ThrowsMessage<Error>(has_all("the file ends early", "--nvme-path", "checkpoint is untouched")));
}

TEST_P(BlockStores, ADiskThatRefusesToWriteIsAnErrorAndTheNextTransferIsTold) {
  BlockStore store(16 * kBlock, options());
  const int descriptor = test::descriptor_of_store();
  const int read_only = open(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(read_only, 0);
  ASSERT_EQ(dup2(read_only, descriptor), descriptor);
  close(read_only);
  Buffer buffer(16 * kBlock);
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THAT([&] { store.write(buffer.span(), 0).wait(); },
                ThrowsMessage<Error>(has_all("writing 8192 bytes at ", "Bad file descriptor")));
}

INSTANTIATE_TEST_SUITE_P(Ways, BlockStores,
                         ::testing::Values(std::pair(true, true), std::pair(true, false),
                                           std::pair(false, true), std::pair(false, false)),
                         [](const auto& info) {
                           return std::string(info.param.first ? "IoUring" : "Threads") +
                                  (info.param.second ? "Direct" : "Buffered");
                         });

TEST(BlockStore, RefusesWhatCannotWork) {
  const std::string folder = ::testing::TempDir();
  EXPECT_ERROR(BlockStore(4096, {.folder = "/nowhere/at/all"}),
               "--nvme-path expects a folder that exists and can be written to, got /nowhere/at/all "
               "(No such file or directory)");
  EXPECT_ERROR(BlockStore(4096, {.folder = "/proc/self"}), "got /proc/self (");
  EXPECT_ERROR(BlockStore(int64_t{1} << 50, {.folder = folder}),
               "the offloaded state needs 1048576.0 GiB (No space left on device)");
}

TEST(BlockStore, LeavesNoName) {
  const fs::path folder = fs::path(::testing::TempDir()) / "block_store_names";
  fs::create_directory(folder);
  {
    const BlockStore store(1 << 20, {.folder = folder.string()});
    EXPECT_TRUE(fs::is_empty(folder));
  }
  EXPECT_EQ(test::descriptor_of_store(), -1);
  fs::remove(folder);
}

// Wherever the system takes everything that was asked for, nothing is noted; a file system in memory may note
// that O_DIRECT is refused, a system without io_uring says so, and both work all the same.
TEST(BlockStore, WorksOnAFileSystemInMemory) {
  if (!fs::is_directory("/dev/shm")) GTEST_SKIP() << "no /dev/shm";
  BlockStore store(4 * kBlock, {.folder = "/dev/shm"});
  for (const std::string& note : store.notes())
    EXPECT_THAT(note, AnyOf(HasSubstr("/dev/shm"), HasSubstr("io_uring")));
  Buffer written(4 * kBlock), read(4 * kBlock);
  store.write(written.fill(3).span(), 0).wait();
  store.read(read.span(), 0).wait();
  EXPECT_TRUE(read == written);
}

}  // namespace
}  // namespace kiln
