// docs/samplers.md says which sampler draws with which objective, as the program does.
#include <gmock/gmock.h>

#include <array>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include "core/json.h"
#include "diffusion/sampler.h"

namespace kiln {
namespace {

TEST(SamplerPage, SaysWhichSamplersFitWhichObjective) {
  std::ifstream file(KILN_SOURCE_DIR "/docs/samplers.md");
  const std::array<nlohmann::json, 3> objectives = {
      {{{"type", "iddpm"}}, {{"type", "ddpm"}}, {{"type", "flow"}}}};
  const std::regex row(R"(\| (`.*`) \| (.*) \| (.*) \| (.*) \|)"), name(R"(`(\w+)`)");
  std::vector<std::string> named;
  std::smatch cells;
  for (std::string line; std::getline(file, line) && !line.starts_with("## ");) {
    if (!std::regex_match(line, cells, row) || line.find("--sampler") != line.npos) continue;
    const std::string names = cells[1];
    for (std::sregex_iterator it(names.begin(), names.end(), name), end; it != end; ++it) {
      named.push_back((*it)[1]);
      for (size_t i = 0; i < objectives.size(); ++i)
        EXPECT_EQ(samples(named.back(), objectives[i]), cells[i + 2] != "refused")
            << named.back() << " with " << objectives[i];
    }
  }
  EXPECT_THAT(named, testing::UnorderedElementsAreArray(sampler_names()));
}

}  // namespace
}  // namespace kiln
