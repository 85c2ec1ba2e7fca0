// docs/options.md has the options of training as the program has them.
#include "run/option_table.h"
#include "run/option_values.h"
#include "test_files.h"

namespace kiln {
namespace {

// Writes the table of each group of options.
struct PageWriter {
  nlohmann::json defaults;
  std::string text;

  void section(const char* title) {
    text += fmt::format(
        "\n## {}\n\n| option | default | changed at a resume | meaning |\n|---|---|---|---|\n", title);
  }
  void operator()(const char* name, const auto&, OnResume on_resume, const std::string& help) {
    std::string cell;
    for (char c : help) cell += c == '|' ? std::string("\\|") : std::string(1, c);
    const std::string value = toml_value(defaults.at(name));
    text += fmt::format("| `--{}` | {} | {} | {} |\n", name,
                        value == "\"\"" || value == "[]" ? "" : "`" + value + "`",
                        on_resume == OnResume::kRefuse ? "refused"
                        : on_resume == OnResume::kWarn ? "warned"
                                                       : "free",
                        cell);
  }
};

TEST(OptionPage, HasEveryOptionWithDefaultMeaningAndEffectOnAResume) {
  TrainOptions options;
  PageWriter writer{.defaults = to_json(options), .text = {}};
  visit_options(options, writer);
  const std::string page = read_bytes(KILN_SOURCE_DIR "/docs/options.md");
  const std::string introduction = page.substr(0, page.find("\n## "));
  const std::string path = KILN_BINARY_DIR "/options.md";
  if (page != introduction + writer.text) std::ofstream(path) << introduction << writer.text;
  EXPECT_EQ(page, introduction + writer.text) << "docs/options.md should be " << path;
}

}  // namespace
}  // namespace kiln
