#include "checkpoint/safetensors.h"

#include <cstring>
#include <filesystem>

#include "checkpoint/weights_file.h"
#include "test_files.h"

namespace kiln {
namespace {

std::string with_header(const std::string& header, std::size_t num_data_bytes) {
  const uint64_t size = header.size();
  std::string file(reinterpret_cast<const char*>(&size), 8);
  return file + header + std::string(num_data_bytes, '\1');
}

std::string safetensors_message(const std::string& file) {
  return message_of(
      [&] { parse_safetensors(std::as_bytes(std::span(file.data(), file.size())), "some.file"); });
}

std::string header_message(const std::string& header, std::size_t num_data_bytes = 0) {
  return safetensors_message(with_header(header, num_data_bytes));
}

template <class T>
NamedTensor named(const std::string& name, Dtype dtype, std::vector<int64_t> shape,
                  const std::vector<T>& values) {
  return {name, {dtype, std::move(shape), std::as_bytes(std::span(values))}};
}

TEST(Safetensors, WritesWhatItReads) {
  const TempFolder folder;
  const std::vector<uint8_t> bytes = {1, 2, 3};
  const std::vector<float> floats = {0.5f, -1, 3, 4, 5, 6};
  const std::vector<int64_t> scalar = {-7};
  const std::vector<float> none;
  write_safetensors(folder / "a.safetensors",
                    {named("bytes", Dtype::kU8, {3}, bytes), named("floats", Dtype::kF32, {2, 3}, floats),
                     named("scalar", Dtype::kI64, {}, scalar), named("none", Dtype::kF32, {0, 4}, none)},
                    {{"format", "pt"}, {"note", "naïve \"quotes\""}});
  const auto file = open_safetensors(folder / "a.safetensors");
  ASSERT_EQ(file->tensors().size(), 4u);
  EXPECT_EQ(file->metadata().at("note"), "naïve \"quotes\"");
  const TensorView& view = file->tensors().at("floats");
  EXPECT_EQ(view.shape, (std::vector<int64_t>{2, 3}));
  ASSERT_EQ(view.bytes.size(), 24u);
  EXPECT_EQ(std::memcmp(view.bytes.data(), floats.data(), 24), 0);
  EXPECT_EQ(file->tensors().at("scalar").shape.size(), 0u);
  EXPECT_EQ(file->tensors().at("none").shape, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(std::memcmp(file->tensors().at("bytes").bytes.data(), bytes.data(), 3), 0);
  // Mapped tensors can be used as they lie: the odd bytes come last.
  for (const auto& [name, tensor] : file->tensors())
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % dtype_size(tensor.dtype), 0u) << name;
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(Safetensors, TheSameInputGivesTheSameBytes) {
  const TempFolder folder;
  const std::vector<float> values = {1, 2};
  for (const char* name : {"a", "b"})
    write_safetensors(folder / name,
                      {named("z", Dtype::kF32, {2}, values), named("a", Dtype::kF32, {1, 2}, values)},
                      {{"k", "v"}});
  EXPECT_EQ(read_bytes(folder / "a"), read_bytes(folder / "b"));
}

TEST(Safetensors, OverwritesAnOlderFileWhole) {
  const TempFolder folder;
  const std::vector<float> old_values(1000, 1.f), new_values = {2.f};
  write_safetensors(folder / "a", {named("w", Dtype::kF32, {1000}, old_values)});
  const auto mapped = open_safetensors(folder / "a");
  write_safetensors(folder / "a", {named("w", Dtype::kF32, {1}, new_values)});
  EXPECT_EQ(open_safetensors(folder / "a")->tensors().at("w").shape[0], 1);
  // A reader that had the old file open keeps it.
  EXPECT_EQ(std::memcmp(mapped->tensors().at("w").bytes.data(), old_values.data(), 4000), 0);
}

TEST(SafetensorsBadInput, LengthsAreCheckedBeforeUse) {
  EXPECT_THAT(safetensors_message("abc"), HasSubstr("3 bytes (some.file): not a safetensors file"));
  std::string huge = with_header("{}", 0);
  huge[7] = '\x7f';
  EXPECT_THAT(safetensors_message(huge), HasSubstr("at most 100000000 are allowed"));
  std::string longer = with_header("{}", 0);
  longer[0] = 3;
  EXPECT_THAT(safetensors_message(longer), HasSubstr("truncated"));
}

TEST(SafetensorsBadInput, HeaderMustBeAnObjectOfTensors) {
  EXPECT_THAT(header_message("{\"a\":"), HasSubstr("the header of some.file is not JSON"));
  EXPECT_THAT(header_message("[1]"), HasSubstr("not an object"));
  EXPECT_THAT(header_message("{\"a\":\n7}"), HasSubstr("\"a\": its header entry is not an object"));
  EXPECT_THAT(header_message(R"({"a":{"dtype":"F32","shape":[1]}})", 4),
              HasSubstr("\"data_offsets\" is missing"));
  EXPECT_THAT(header_message(R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("\"dtype\" is not a string"));
  EXPECT_THAT(header_message(R"({"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}})", 4),
              HasSubstr("F8_E4M3"));
  EXPECT_THAT(header_message(R"({"__metadata__":{"a":1}})"), HasSubstr("metadata \"a\" is not a string"));
  EXPECT_THAT(header_message(std::string(100000, '[') + std::string(100000, ']')),
              HasSubstr("nested levels"));
}

TEST(SafetensorsBadInput, ShapesAndOffsetsMustAgree) {
  const auto entry = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  EXPECT_THAT(header_message(entry("[2]", "[0,8]"), 4), HasSubstr("truncated"));
  EXPECT_THAT(header_message(entry("[2]", "[0,4]"), 4),
              HasSubstr("expected 8 bytes by dtype and shape, got 4"));
  EXPECT_THAT(header_message(entry("[2]", "[4,0]"), 4), HasSubstr("ends before it begins"));
  EXPECT_THAT(header_message(entry("[-1]", "[0,4]"), 4), HasSubstr("not a valid number"));
  EXPECT_THAT(header_message(entry("[1.0]", "[0,4]"), 4), HasSubstr("not a valid number"));
  EXPECT_THAT(header_message(entry("[1]", "[0,18446744073709551615]"), 4), HasSubstr("not a valid number"));
  // 2^62 * 4 * 4 wraps to 0 in 64 bits.
  EXPECT_THAT(header_message(entry("[4611686018427387904,4]", "[0,0]")), HasSubstr("too large to count"));
}

TEST(SafetensorsBadInput, TensorsMustTileTheData) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_THAT(header_message(two("[0,4]", "[2,6]"), 6), HasSubstr("overlap before tensor \"b\""));
  EXPECT_THAT(header_message(two("[0,4]", "[6,10]"), 10), HasSubstr("hole before tensor \"b\""));
  EXPECT_THAT(header_message(two("[0,4]", "[4,8]"), 9), HasSubstr("expected 8 bytes of data, got 9"));
}

TEST(SafetensorsBadInput, DuplicateKeysAreRefused) {
  const std::string entry = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(header_message("{" + entry + "," + entry + "}", 1), HasSubstr("key \"a\" occurs twice"));
  EXPECT_THAT(header_message(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("key \"dtype\" occurs twice"));
}

TEST(SafetensorsBadInput, EveryTruncationOfAGoodFileIsRefused) {
  const TempFolder folder;
  const std::vector<float> values = {1, 2, 3};
  write_safetensors(folder / "a", {named("w", Dtype::kF32, {3}, values)}, {{"k", "v"}});
  const std::string whole = read_bytes(folder / "a");
  for (std::size_t size = 0; size < whole.size(); ++size) safetensors_message(whole.substr(0, size));
}

TEST(SafetensorsIndex, ReadsShardsAndNamesWhatIsMissing) {
  const TempFolder folder;
  const std::vector<float> values = {1, 2, 3};
  write_safetensors(folder / "one.safetensors", {named("a", Dtype::kF32, {3}, values)});
  write_safetensors(folder / "two.safetensors", {named("b", Dtype::kF32, {1, 3}, values)});
  const auto index = [&](const std::string& map) {
    write_bytes(folder / "x.index.json", R"({"metadata":{"total_size":24},"weight_map":)" + map + "}");
    return open_tensor_file(folder / "x.index.json");
  };
  const auto file = index(R"({"a":"one.safetensors","b":"two.safetensors"})");
  ASSERT_EQ(file->tensors().size(), 2u);
  EXPECT_EQ(std::memcmp(file->tensors().at("b").bytes.data(), values.data(), 12), 0);
  EXPECT_ERROR(index(R"({"c":"one.safetensors"})"), "tensor \"c\" is not in its shard \"one.safetensors\"");
  EXPECT_ERROR(index(R"({"a":"three.safetensors"})"), "shard \"three.safetensors\" is missing");
  EXPECT_ERROR(index(R"({"a":"../one.safetensors"})"), "not a plain file name");
  EXPECT_ERROR(index("7"), "weight_map");
}

TEST(WeightsFile, IsToldByItsContent) {
  const TempFolder folder;
  const std::vector<float> values = {1};
  write_safetensors(folder / "named.pt", {named("w", Dtype::kF32, {1}, values)});
  EXPECT_EQ(tensor_file_format(folder / "named.pt"), TensorFileFormat::kSafetensors);
  EXPECT_ERROR(open_tensor_file(folder / "absent"), "cannot read");
  write_bytes(folder / "empty", "");
  EXPECT_ERROR(open_tensor_file(folder / "empty"), "empty");
  std::filesystem::create_directory(folder / "sub");
  EXPECT_ERROR(open_tensor_file(folder / "sub"), "no weights in the folder");
}

}  // namespace
}  // namespace kiln
