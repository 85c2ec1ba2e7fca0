#include "checkpoint/weights_file.h"

#include <zlib.h>

#include <cstring>
#include <numeric>

#include "pickle_builder.h"
#include "test_files.h"

namespace kiln {
namespace {

using test::global, test::pickled, test::pickled_dict, test::PickledTensor, test::pt_archive;

std::string float_bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}
const std::string kSix = float_bytes({0, 1, 2, 3, 4, 5});

// `file` must outlive the result.
std::unique_ptr<TensorFile> parse(const std::string& file, bool prefer_ema = true) {
  return parse_pt(std::as_bytes(std::span(file.data(), file.size())), "some.pt", prefer_ema);
}
std::string pt_message(const std::string& file) {
  return message_of([&] { parse(file); });
}
std::vector<float> floats(const TensorView& view) {
  std::vector<float> values(view.bytes.size() / sizeof(float));
  std::memcpy(values.data(), view.bytes.data(), view.bytes.size());
  return values;
}

TEST(PtFile, WritesWhatItReads) {
  const TempFolder folder;
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> bytes = {7};
  const std::vector<NamedTensor> tensors = {
      {"b.weight", {Dtype::kF32, {2, 3}, std::as_bytes(std::span(values))}},
      {"a", {Dtype::kU8, {}, std::as_bytes(std::span(bytes))}}};
  write_pt(folder / "plain.pt", {{"", tensors}});
  const auto file = open_pt(folder / "plain.pt");
  ASSERT_EQ(file->tensors().size(), 2u);
  EXPECT_EQ(floats(file->tensors().at("b.weight")), values);
  EXPECT_EQ(file->tensors().at("b.weight").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(file->tensors().at("a").shape.empty());
  EXPECT_EQ(file->tensors().at("a").dtype, Dtype::kU8);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file->tensors().at("b.weight").bytes.data()) % 64, 0u);
  write_pt(folder / "again.pt", {{"", tensors}});
  EXPECT_EQ(test::read_bytes(folder / "plain.pt"), test::read_bytes(folder / "again.pt"));
}

TEST(PtFile, TakesTheEmaOfATrainingCheckpointUnlessToldOtherwise) {
  const TempFolder folder;
  const std::vector<float> model = {1}, ema = {2};
  const auto tensor = [](const std::vector<float>& values) {
    return std::vector<NamedTensor>{{"w", {Dtype::kF32, {1}, std::as_bytes(std::span(values))}}};
  };
  write_pt(folder / "dit.pt", {{"model", tensor(model)}, {"ema", tensor(ema)}});
  EXPECT_THAT(floats(open_pt(folder / "dit.pt")->tensors().at("w")), ElementsAre(2));
  EXPECT_EQ(open_pt(folder / "dit.pt")->metadata().at("pt_group"), "ema");
  EXPECT_THAT(floats(open_pt(folder / "dit.pt", false)->tensors().at("w")), ElementsAre(1));
  write_pt(folder / "pixart.pth", {{"state_dict", tensor(model)}, {"state_dict_ema", tensor(ema)}});
  EXPECT_EQ(open_tensor_file(folder / "pixart.pth")->metadata().at("pt_group"), "state_dict_ema");
  EXPECT_EQ(open_tensor_file(folder / "pixart.pth", false)->metadata().at("pt_group"), "state_dict");
}

TEST(PtFile, SkipsUnknownClassesAndStateWithoutRunningThem) {
  const std::string arguments = global("argparse", "Namespace") + ")\x81" +
                                pickled_dict(pickled("lr") + "G" + std::string(8, '\0')) + "b";
  const std::string file = pt_archive(
      pickled_dict(pickled("model") +
                   pickled_dict(pickled("w") + pickled(PickledTensor{}) + pickled("steps") + pickled(7)) +
                   pickled("args") + arguments + pickled("ema") + "N"),
      {kSix});
  const auto parsed = parse(file);
  EXPECT_EQ(parsed->metadata().at("pt_group"), "model");
  ASSERT_EQ(parsed->tensors().size(), 1u);
  EXPECT_THAT(floats(parsed->tensors().at("w")), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(PtFile, MaterialisesTransposedAndSlicedTensorsAndSharesStorages) {
  const PickledTensor transposed{.shape = {3, 2}, .strides = {1, 3}};
  const PickledTensor sliced{.offset = 1, .shape = {2, 2}, .strides = {3, 1}};
  const PickledTensor row{.offset = 3, .shape = {3}, .strides = {1}};
  const PickledTensor empty{.shape = {0, 3}, .strides = {3, 1}};
  const std::string file =
      pt_archive(pickled_dict(pickled("t") + pickled(transposed) + pickled("s") + pickled(sliced) +
                              pickled("r") + pickled(row) + pickled("e") + pickled(empty)),
                 {kSix});
  const auto parsed = parse(file);
  EXPECT_THAT(floats(parsed->tensors().at("t")), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(floats(parsed->tensors().at("s")), ElementsAre(1, 2, 4, 5));
  EXPECT_THAT(floats(parsed->tensors().at("r")), ElementsAre(3, 4, 5));
  EXPECT_TRUE(parsed->tensors().at("e").bytes.empty());
  const std::byte* begin = reinterpret_cast<const std::byte*>(file.data());
  EXPECT_TRUE(parsed->tensors().at("r").bytes.data() > begin &&
              parsed->tensors().at("r").bytes.data() < begin + file.size())
      << "a dense tensor is a view of the file";
}

TEST(PtFile, ReadsParametersAndDropsWrapperPrefixes) {
  const std::string parameter =
      global("torch._utils", "_rebuild_parameter") + "(" + pickled(PickledTensor{}) + "\x88" + "}tR";
  const std::string file = pt_archive(pickled_dict(pickled("module._orig_mod.w") + parameter), {kSix});
  EXPECT_TRUE(parse(file)->tensors().contains("w"));
}

TEST(PtFile, UnpacksDeflatedMembers) {
  const std::string content = float_bytes(std::vector<float>(1000, 2.5f));
  std::string packed(content.size(), '\0');
  z_stream stream = {};
  ASSERT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  ASSERT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  const PickledTensor tensor{.storage_elements = 1000, .shape = {1000}, .strides = {1}};
  std::vector<test::ZipMember> members = {
      {"a/data.pkl", test::program(pickled_dict(pickled("w") + pickled(tensor)))},
      {"a/data/0", content, 8, packed}};
  const std::string file = test::zip_archive(members);
  EXPECT_EQ(floats(parse(file)->tensors().at("w")), std::vector<float>(1000, 2.5f));
  members[1].packed[3] ^= 0x55;
  EXPECT_THAT(pt_message(test::zip_archive(members)), HasSubstr("the file is damaged"));
  members[1].content.resize(40'000'000);  // more than deflate can pack into so few bytes
  EXPECT_THAT(pt_message(test::zip_archive(members)), HasSubstr("claims to unpack to"));
}

TEST(PtHostile, DangerousNamesAreRefusedByName) {
  const std::pair<const char*, const char*> names[] = {{"os", "system"},        {"posix", "system"},
                                                       {"builtins", "eval"},    {"__builtin__", "getattr"},
                                                       {"subprocess", "Popen"}, {"os.path", "join"}};
  for (const auto& [module, name] : names) {
    const std::string call = global(module, name) + pickled("true") + "\x85R";
    EXPECT_THAT(pt_message(pt_archive(call, {})), has_all(std::string(module) + "." + name, "attack"));
    // The same by name on the stack (protocol 4).
    EXPECT_THAT(pt_message(pt_archive(pickled(module) + pickled(name) + "\x93)R", {})), HasSubstr(module));
  }
  const std::string harmless = pickled_dict(pickled("w") + pickled(PickledTensor{}) + pickled("s") +
                                            global("builtins", "set") + "]\x85R");
  EXPECT_NO_THROW(parse(pt_archive(harmless, {kSix})));
}

TEST(PtHostile, TensorBoundsAreChecked) {
  const auto message = [](const PickledTensor& tensor) {
    return pt_message(pt_archive(pickled_dict(pickled("w") + pickled(tensor)), {kSix}));
  };
  EXPECT_THAT(message({.offset = 1}), HasSubstr("\"w\": it reaches element 6 of a storage of 6"));
  EXPECT_THAT(message({.shape = {2, 4}, .strides = {4, 1}}), HasSubstr("reaches element 7"));
  EXPECT_THAT(message({.storage_elements = 7}), HasSubstr("claims 7 elements, the file has 24 bytes"));
  EXPECT_THAT(message({.storage_elements = -1}), HasSubstr("claims -1 elements"));
  EXPECT_THAT(message({.offset = -4}), HasSubstr("description is incomplete"));
  EXPECT_THAT(message({.shape = {-1, 3}}), HasSubstr("not a number from 0 on"));
  EXPECT_THAT(message({.shape = {2, 3, 1}}), HasSubstr("differ in length"));
  EXPECT_THAT(message({.shape = {2000000000, 2000000000, 2000000000}, .strides = {0, 0, 0}}),
              HasSubstr("too large to count"));
  EXPECT_THAT(message({.shape = {2000000000}, .strides = {0}}), HasSubstr("is expanded"));
  EXPECT_THAT(message({.storage = "1"}), HasSubstr("\"archive/data/1\" is missing"));
  EXPECT_THAT(message({.type = "ComplexFloatStorage"}), HasSubstr("torch.ComplexFloatStorage"));
  EXPECT_THAT(message({.function = "_rebuild_qtensor"}), HasSubstr("torch._utils._rebuild_qtensor"));
}

TEST(PtHostile, ManyTransposedViewsOfOneStorageCannotFillTheMemory) {
  std::string items;
  for (int i = 0; i < 2000; ++i)
    items += pickled(std::to_string(i)) +
             pickled(PickledTensor{.storage_elements = 1024, .shape = {32, 32}, .strides = {1, 32}});
  EXPECT_THAT(pt_message(pt_archive(pickled_dict(items), {std::string(4096, 'x')})),
              HasSubstr("too many transposed views"));
}

TEST(PtHostile, DamagedPicklesAreRefused) {
  EXPECT_THAT(pt_message(pt_archive("", {})), HasSubstr("the stack is empty"));
  EXPECT_THAT(pt_message(pt_archive("u", {})), HasSubstr("a mark is missing"));
  EXPECT_THAT(pt_message(pt_archive("}(0u", {})), HasSubstr("the stack is empty"));  // below the mark
  EXPECT_THAT(pt_message(pt_archive("h\x05", {})), HasSubstr("unknown memo entry"));
  EXPECT_THAT(pt_message(pt_archive("i", {})), HasSubstr("unknown opcode 0x69 at byte 2"));
  EXPECT_THAT(pt_message(pt_archive("X\xff\xff\xff\xff", {})), HasSubstr("ends too early"));
  EXPECT_THAT(pt_message(pt_archive("}(" + pickled("a") + "u", {})), HasSubstr("a key has no value"));
  EXPECT_THAT(pt_message(pt_archive("]", {})), HasSubstr("expected a dict"));
  EXPECT_THAT(pt_message(pt_archive(global("models", "DiT") + ")\x81", {})),
              has_all("object of class models.DiT", "save model.state_dict()"));
  EXPECT_THAT(pt_message(pt_archive(pickled_dict(pickled("epoch") + pickled(3)), {})),
              has_all("no state dict found", "\"epoch\""));
  // A list that holds itself, and a dict as its own value: no endless walk.
  EXPECT_THAT(pt_message(pt_archive("]q\1h\1a", {})), HasSubstr("expected a dict"));
  EXPECT_THAT(pt_message(pt_archive("}q\1" + pickled("ema") + "h\1s", {})), HasSubstr("no state dict found"));
}

TEST(PtHostile, DamagedArchivesAreRefused) {
  const std::string good = pt_archive(pickled_dict(pickled("w") + pickled(PickledTensor{})), {kSix});
  EXPECT_NO_THROW(parse(good));
  for (std::size_t size = 0; size < good.size(); ++size) pt_message(good.substr(0, size));
  std::string flipped = good;
  flipped[60] ^= 1;  // within data.pkl
  EXPECT_THAT(pt_message(flipped), HasSubstr("wrong checksum"));
  EXPECT_THAT(pt_message(test::zip_archive({{"a", "x"}, {"a", "y"}})), HasSubstr("occurs twice"));
  EXPECT_THAT(pt_message(test::zip_archive({{"a", "x"}})), HasSubstr("no data.pkl"));
  EXPECT_THAT(pt_message(test::zip_archive({{"a/data.pkl", "x"}, {"a/constants.pkl", "x"}})),
              HasSubstr("TorchScript"));
  EXPECT_THAT(pt_message(test::zip_archive({{"a/data.pkl", "x"}, {"a/byteorder", "big"}})),
              HasSubstr("big-endian"));
}

TEST(PtHostile, Finding10NothingUnpacksToMoreThanItHolds) {
  std::string twice = test::zip_archive({{"a/data.pkl", "x"}, {"a/data/0", "x"}});
  twice.replace(twice.rfind("PK\x01\x02") + 42, 4, 4, '\0');  // where the first one lies
  EXPECT_THAT(pt_message(twice), HasSubstr("members overlap"));
  const test::ZipMember large{.name = "a/data.pkl",
                              .content = std::string(17 << 20, '.'),
                              .method = 8,
                              .packed = std::string(20'000, 'x')};
  EXPECT_THAT(pt_message(test::zip_archive({large})), HasSubstr("the pickle has 17825792 bytes, at most"));
}

TEST(PtHostile, OldFormatSaysHowToRewriteIt) {
  EXPECT_THAT(pt_message("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19."),
              has_all("before 1.6", "some.pt", "torch.load and torch.save"));
  EXPECT_THAT(pt_message("hello"), HasSubstr("expected a file of torch.save"));
}

}  // namespace
}  // namespace kiln
