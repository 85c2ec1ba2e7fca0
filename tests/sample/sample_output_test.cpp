// The folder of generated pictures and the choice of classes.
#include "sample/sample_output.h"

#include <map>
#include <span>

#include "core/text/nearest_name.h"
#include "data/images/images.h"
#include "sample/subjects.h"
#include "test_files.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

class Output : public ::testing::Test {
 protected:
  void SetUp() override {
    options_ = {.folder = (folder_ / "images").string(),
                .npz = (folder_ / "images.npz").string(),
                .num_images = 5,
                .height = 4,
                .width = 6,
                .settings = {{"seed", 1}, {"sampler", "ddpm"}}};
  }

  static Image picture(int64_t index) {
    return {.height = 4, .width = 6, .rgb = std::vector<uint8_t>(72, static_cast<uint8_t>(10 * index + 1))};
  }
  static std::vector<std::string> names() { return {"0.png", "1.png", "2.png", "3.png", "4.png"}; }

  static void add_all(SampleOutput& output, const std::vector<int64_t>& images) {
    for (const int64_t i : images) output.add(i, picture(i));
  }
  static void finish(SampleOutput& output) {
    add_all(output, output.missing());
    output.finish();
  }
  void draw_all(const SampleOutputOptions& options) const {
    SampleOutput output(options, names());
    finish(output);
  }
  std::string npz_bytes() const { return read_bytes(options_.npz); }

  test::TempFolder temporary_;
  fs::path folder_ = temporary_.path();
  SampleOutputOptions options_;
};

TEST_F(Output, GoesOnWhereItStopped) {
  {
    SampleOutput output(options_, names());
    EXPECT_THAT(output.missing(), ElementsAre(0, 1, 2, 3, 4));
    add_all(output, {0, 1});
  }  // killed
  {
    SampleOutput output(options_, names());
    EXPECT_THAT(output.missing(), ElementsAre(2, 3, 4));
    finish(output);
  }
  const std::string resumed = npz_bytes();
  for (int64_t i = 0; i < 5; ++i)
    EXPECT_EQ(read_image(options_.folder + "/" + names()[i]).rgb, picture(i).rgb);

  fs::remove_all(options_.folder);
  fs::remove(options_.npz);
  draw_all(options_);
  EXPECT_EQ(npz_bytes(), resumed);
  EXPECT_FALSE(resumed.empty());
}

TEST_F(Output, FillsTheNpzFromPicturesThatAreThere) {
  SampleOutputOptions png_only = options_;
  png_only.npz.clear();
  draw_all(png_only);
  fs::remove(fs::path(options_.folder) / "2.png");  // one is to be drawn again
  SampleOutput output(options_, names());
  EXPECT_THAT(output.missing(), ElementsAre(2));
  finish(output);
  const std::string bytes = npz_bytes();
  for (int64_t i = 0; i < 5; ++i)
    EXPECT_NE(bytes.find(std::string(72, static_cast<char>(10 * i + 1))), std::string::npos) << i;
}

TEST_F(Output, NpzAloneResumesToo) {
  options_.write_png = false;
  {
    SampleOutput output(options_, names());
    add_all(output, {0, 1, 2});
  }
  SampleOutput output(options_, names());
  EXPECT_THAT(output.missing(), ElementsAre(3, 4));
  finish(output);
  EXPECT_TRUE(fs::exists(options_.npz));
  EXPECT_FALSE(fs::exists(fs::path(options_.folder) / "0.png"));
}

std::map<std::string, std::string> texts_of(const std::string& path) {
  const std::string bytes = read_bytes(path);
  const PngTexts texts = png_texts(std::as_bytes(std::span(bytes)));
  return {texts.begin(), texts.end()};
}

TEST_F(Output, PicturesAndGridsSayHowTheyWereDrawn) {
  options_.num_images = 2;
  options_.settings["prompts"] = {"a \xc3\xa4pple", "two birds"};
  options_.settings["image"] = "the picture that drawing started from";
  options_.words = [](int64_t image) { return image == 0 ? "a \xc3\xa4pple" : "two birds"; };
  SampleOutput output(options_, names());
  finish(output);
  auto texts = texts_of(options_.folder + "/0.png");
  EXPECT_EQ(texts["Description"], "a \xc3\xa4pple");
  EXPECT_EQ(nlohmann::json::parse(texts["kiln"]),
            nlohmann::json({{"seed", 1},
                            {"sampler", "ddpm"},
                            {"image", "the picture that drawing started from"},
                            {"index", 0},
                            {"prompt", "a \xc3\xa4pple"}}));
  texts = texts_of(output.write_grid(2, 2));
  EXPECT_FALSE(texts.contains("Description"));
  EXPECT_EQ(nlohmann::json::parse(texts["kiln"]), options_.settings);
}

// A file of many prompts would be in each of as many pictures.
TEST_F(Output, TextsSayWhatTheirOwnPicturesShow) {
  for (const char* key : {"prompts", "classes"}) {
    options_.folder = (folder_ / key).string();
    options_.npz.clear();
    options_.settings = {{"seed", 1}, {key, {5, 6, 7, 8, 9}}};
    options_.words = [](int64_t image) { return "bird " + std::to_string(image); };
    SampleOutput output(options_, names());
    finish(output);
    const std::string grid = texts_of(output.write_grid(2, 2)).at("kiln");
    EXPECT_EQ(nlohmann::json::parse(grid), nlohmann::json({{"seed", 1}, {key, {"bird 0", "bird 1"}}}));
    EXPECT_FALSE(nlohmann::json::parse(texts_of(options_.folder + "/3.png").at("kiln")).contains(key));
  }
}

using Role = SampleOutputOptions::Role;

TEST_F(Output, SeveralProcessesMakeTheSameNpz) {
  draw_all(options_);
  const std::string expected = npz_bytes();
  for (bool write_png : {true, false}) {
    fs::remove_all(options_.folder);
    fs::remove(options_.npz);
    SampleOutputOptions first_options = options_, other_options = options_;
    first_options.write_png = other_options.write_png = write_png;
    first_options.role = Role::kFirst;
    other_options.role = Role::kOther;
    SampleOutput first(first_options, names()), other(other_options, names());
    EXPECT_THAT(first.missing(), ElementsAre(0, 1, 2, 3, 4));
    add_all(other, {3, 1});
    add_all(first, {0, 2, 4});
    first.finish();
    EXPECT_EQ(npz_bytes(), expected);
    EXPECT_EQ(fs::exists(fs::path(options_.folder) / "3.png"), write_png);
    EXPECT_FALSE(fs::exists(fs::path(options_.folder) / "passing"));
  }
}

TEST_F(Output, OneProcessGoesOnWithWhatSeveralLeft) {
  options_.write_png = false;
  {
    SampleOutputOptions other = options_;
    other.role = Role::kOther;
    SampleOutput(other, names()).add(3, picture(3));
  }  // killed
  SampleOutput output(options_, names());
  EXPECT_THAT(output.missing(), ElementsAre(0, 1, 2, 4));
  finish(output);
  EXPECT_NE(npz_bytes().find(std::string(72, static_cast<char>(31))), std::string::npos);
  EXPECT_FALSE(fs::exists(fs::path(options_.folder) / "passing"));
}

TEST_F(Output, RefusesAnotherRunsFolder) {
  { SampleOutput(options_, names()).add(0, picture(0)); }
  options_.settings["seed"] = 2;
  EXPECT_ERROR(SampleOutput(options_, names()), "other settings: seed");
  options_.settings["sampler"] = "ddim";
  EXPECT_ERROR(SampleOutput(options_, names()), "sampler, seed");
}

TEST_F(Output, RefusesAnotherRunsNpz) {
  { SampleOutput(options_, names()).add(0, picture(0)); }
  fs::remove_all(options_.folder);  // the images are gone, their copy in the npz is not
  options_.settings["seed"] = 2;
  EXPECT_ERROR(SampleOutput(options_, names()), "images.npz.partial", "other settings");
  EXPECT_TRUE(fs::is_empty(options_.folder));  // so that the first run can go on
  options_.settings["seed"] = 1;
  EXPECT_THAT(SampleOutput(options_, names()).missing(), ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(Output, MoreImagesOfTheSameSettingsExtendAFolder) {
  options_.npz.clear();
  { SampleOutput(options_, names()).add(0, picture(0)); }
  options_.num_images = 3;
  EXPECT_THAT(SampleOutput(options_, names()).missing(), ElementsAre(1, 2));
}

TEST_F(Output, WritesAGrid) {
  SampleOutput output(options_, names());
  finish(output);
  const Image grid = read_image(output.write_grid(5, 3));
  EXPECT_GE(grid.width, 3 * 6);
  EXPECT_GE(grid.height, 2 * 4);
}

TEST_F(Output, AFolderThatCannotBeMadeIsNamed) {
  std::ofstream(folder_ / "file") << "not a folder";
  options_.folder = (folder_ / "file" / "images").string();
  EXPECT_ERROR(SampleOutput(options_, names()), "file/images");
}

const std::vector<std::string> kNames = {"Smileys & Emotion", "Animals & Nature", "Food & Drink", "7"};

TEST(SelectClasses, ByNumberOrName) {
  EXPECT_THAT(select_classes({"2", "animals & nature", "0"}, kNames, 4), ElementsAre(2, 1, 0));
  EXPECT_THAT(select_classes({"7"}, kNames, 4), ElementsAre(3));  // a name wins
  EXPECT_THAT(select_classes({}, kNames, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(select_classes({"all"}, {}, 2), ElementsAre(0, 1));
  EXPECT_THAT(select_classes({}, {}, 0), ElementsAre(0));
}

TEST(SelectClasses, UnknownNamesGetTheNearestOnes) {
  EXPECT_ERROR(select_classes({"animals"}, kNames, 4), "\"animals\"", "nearest are Animals & Nature");
  EXPECT_THAT(nearest_names("Food & Drinks", kNames, 1), ElementsAre("Food & Drink"));
  EXPECT_THAT(nearest_names("x", {}, 3), IsEmpty());
}

TEST(SelectClasses, BadNumbersAndModelsWithoutNames) {
  EXPECT_ERROR(select_classes({"4"}, kNames, 4), "0..3");
  EXPECT_ERROR(select_classes({"-1"}, {}, 4), "0..3");
  EXPECT_ERROR(select_classes({"cat"}, {}, 4), "no class names");
  EXPECT_ERROR(select_classes({"1"}, {}, 0), "--classes");
}

}  // namespace
}  // namespace kiln
