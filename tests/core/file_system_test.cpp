#include "core/files/file_system.h"

#include "test_files.h"

namespace kiln {
namespace {

TEST(FileSystem, NetworkOnesAreKnownByTheirTypes) {
  for (const auto& [magic, name] : {std::pair{0x6969L, "NFS"},
                                    {0xFF534D42L, "CIFS"},
                                    {0xFE534D42L, "SMB2"},
                                    {0x0BD00BD0L, "Lustre"},
                                    {0x00C36400L, "Ceph"},
                                    {0x47504653L, "GPFS"},
                                    {0x19830326L, "BeeGFS"}}) {
    const FileSystem found = file_system_of_type(magic);
    EXPECT_EQ(found.name, name);
    EXPECT_TRUE(found.is_network) << name;
  }
  // The kernel widens the type with its sign on some processors.
  EXPECT_EQ(file_system_of_type(static_cast<int32_t>(0xFF534D42)).name, "CIFS");
}

TEST(FileSystem, OthersAreNotOnANetwork) {
  for (const auto& [magic, name] :
       {std::pair{0xEF53L, "ext4"}, {0x01021994L, "tmpfs"}, {0x65735546L, "FUSE"}}) {
    const FileSystem found = file_system_of_type(magic);
    EXPECT_EQ(found.name, name);
    EXPECT_FALSE(found.is_network) << name;
  }
  EXPECT_EQ(file_system_of_type(12345).name, "");
  EXPECT_EQ(file_system_of("/proc/self").name, "");  // the kernel's own, which nobody trains on
}

TEST(FileSystem, APathThatIsNotThereYetLiesWhereItsFolderDoes) {
  const test::TempFolder folder;
  EXPECT_EQ(existing_folder(folder / "a/b/c"), folder.path().string());
  EXPECT_EQ(file_system_of(folder / "a/b").name, file_system_of(folder.path().string()).name);
  test::write_bytes(folder / "file", "x");
  EXPECT_EQ(existing_folder(folder / "file"), folder.path().string());
}

}  // namespace
}  // namespace kiln
