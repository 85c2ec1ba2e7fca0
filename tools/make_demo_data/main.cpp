// kiln-demo-data: the colour emoji of a font as a folder of pictures with classes and captions.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <numeric>

#include "annotations.h"
#include "core/command_line.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/input_file.h"
#include "core/json.h"
#include "data/images/images.h"
#include "emoji_font.h"
#include "emoji_list.h"

namespace kiln::demo {
namespace {

struct Options {
  std::string out;
  std::string font = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf";
  std::string emoji_list = "/usr/share/unicode/emoji/emoji-test.txt";
  std::vector<std::string> classes;
  std::vector<std::string> except;
  std::vector<std::string> annotations;
  bool skin_tones = true;
  int64_t size = 128;
};

constexpr int kNameWeight = 3;  // how much more often the name is an emoji's caption than its keywords

// A class is chosen by names of groups or subgroups; a name may end in '*'.
struct ClassRule {
  std::string name;
  std::vector<std::string> patterns;
};

struct Picture {
  Emoji emoji;
  std::string keywords;
  std::string label;
  uint32_t glyph = 0;
  std::string file_name() const { return label + "/" + emoji.file_stem() + ".png"; }
};

bool matches(const std::string& pattern, const std::string& name) {
  if (pattern.ends_with('*')) return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return name == pattern;
}

bool matches_emoji(const std::string& pattern, const Emoji& emoji) {
  return matches(pattern, class_name_of(emoji.group)) || matches(pattern, emoji.subgroup) ||
         matches(pattern, emoji.name);
}

std::vector<ClassRule> parse_rules(const std::vector<std::string>& texts) {
  std::vector<ClassRule> rules;
  for (const std::string& text : texts) {
    const auto equals = text.find('=');
    ClassRule rule{text.substr(0, equals), {}};
    if (rule.name.empty() || rule.name.find('/') != std::string::npos)
      fail("demo-data", "--classes: expected NAME or NAME=GROUP+SUBGROUP, got '{}'", text);
    if (equals == std::string::npos) {
      rule.patterns.push_back(rule.name);
    } else {
      rule.patterns = CLI::detail::split(text.substr(equals + 1), '+');
    }
    rules.push_back(std::move(rule));
  }
  return rules;
}

// Every pattern must choose something: a misspelt one would silently make the set smaller.
void check_patterns(const std::vector<std::string>& patterns, const std::vector<Emoji>& emoji,
                    const char* option) {
  for (const std::string& pattern : patterns) {
    const bool found = std::any_of(emoji.begin(), emoji.end(),
                                   [&](const Emoji& one) { return matches_emoji(pattern, one); });
    if (!found)
      fail("demo-data", "{}: '{}' is no group, subgroup or name of an emoji (--list shows them)", option,
           pattern);
  }
}

std::string choose_class(const std::vector<ClassRule>& rules, const Emoji& emoji) {
  if (rules.empty()) return class_name_of(emoji.group);
  for (const ClassRule& rule : rules)
    for (const std::string& pattern : rule.patterns)
      if (matches_emoji(pattern, emoji)) return rule.name;
  return {};
}

std::vector<Picture> choose_pictures(const Options& options, const std::vector<Emoji>& list,
                                     const EmojiFont& font) {
  const auto rules = parse_rules(options.classes);
  for (const ClassRule& rule : rules) check_patterns(rule.patterns, list, "--classes");
  check_patterns(options.except, list, "--except");
  Annotations annotations;
  for (const std::string& path : options.annotations) read_annotations(path, annotations);
  std::vector<Picture> pictures;
  std::map<uint32_t, std::string> drawn;  // two sequences of one glyph would be a picture twice
  int64_t num_without_glyph = 0, num_twice = 0;
  for (const Emoji& emoji : list) {
    const std::string label = choose_class(rules, emoji);
    if (label.empty() || (!options.skin_tones && emoji.has_skin_tone())) continue;
    if (std::any_of(options.except.begin(), options.except.end(),
                    [&](const std::string& pattern) { return matches_emoji(pattern, emoji); }))
      continue;
    const auto glyph = font.glyph_of(emoji.code_points);
    if (!glyph) {
      ++num_without_glyph;
    } else if (!drawn.emplace(*glyph, emoji.name).second) {
      ++num_twice;
    } else {
      pictures.push_back({emoji, keywords_of(annotations, emoji.code_points), label, *glyph});
    }
  }
  if (num_without_glyph) fmt::print("{} emoji are not in the font\n", num_without_glyph);
  if (num_twice) fmt::print("{} emoji look exactly like another one and are left out\n", num_twice);
  if (pictures.empty()) fail("demo-data", "no emoji is left to write: choose other --classes");
  return pictures;
}

std::string metadata_of(const std::vector<Picture>& pictures) {
  std::string lines;
  for (const Picture& picture : pictures) {
    nlohmann::ordered_json text = picture.emoji.name;
    if (!picture.keywords.empty() && picture.keywords != picture.emoji.name)
      text = {{{"text", picture.emoji.name}, {"kind", "name"}, {"weight", kNameWeight}},
              {{"text", picture.keywords}, {"kind", "keywords"}, {"weight", 1}}};
    const nlohmann::ordered_json line = {{"file_name", picture.file_name()},
                                         {"text", text},
                                         {"label", picture.label},
                                         {"group", picture.emoji.group},
                                         {"subgroup", picture.emoji.subgroup}};
    lines += line.dump() + "\n";
  }
  return lines;
}

bool has_same_pictures(const std::filesystem::path& out, const std::string& metadata, int64_t size) {
  if (!std::filesystem::exists(out / "metadata.jsonl")) return false;
  const auto bytes = read_file("demo-data", out / "metadata.jsonl");
  if (std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()) != metadata) return false;
  const std::string first = nlohmann::json::parse(metadata.substr(0, metadata.find('\n'))).at("file_name");
  return read_image(out / first).height == size;
}

// The folder appears under its name when it is complete.
void write_pictures(const Options& options, const std::vector<Picture>& pictures, const EmojiFont& font) {
  namespace fs = std::filesystem;
  const std::string metadata = metadata_of(pictures);
  if (has_same_pictures(options.out, metadata, options.size)) {
    fmt::print("{} already holds these {} pictures\n", options.out, pictures.size());
    return;
  }
  if (fs::exists(options.out) && !fs::is_empty(options.out))
    fail("demo-data", "expected a new or empty folder, got {}: remove it or choose another --out",
         options.out);
  const fs::path partial = options.out + ".partial";
  fs::remove_all(partial);
  std::map<std::string, int64_t> counts;
  for (const Picture& picture : pictures) {
    if (counts[picture.label]++ == 0) fs::create_directories(partial / picture.label);
    write_png(partial / picture.file_name(), font.draw(picture.glyph, options.size));
  }
  write_file_atomically("demo-data", partial / "metadata.jsonl", metadata);
  fs::rename(partial, options.out);
  for (const auto& [label, count] : counts) fmt::print("{:6} {}\n", count, label);
  fmt::print("{} pictures of {} x {} in {}\n", pictures.size(), options.size, options.size, options.out);
}

void list_groups(const std::vector<Emoji>& list) {
  std::vector<std::pair<std::string, int64_t>> lines;
  for (const Emoji& emoji : list) {
    const std::string line = class_name_of(emoji.group) + "  " + emoji.subgroup;
    if (lines.empty() || lines.back().first != line) lines.emplace_back(line, 0);
    ++lines.back().second;
  }
  for (const auto& [line, count] : lines) fmt::print("{:5}  {}\n", count, line);
}

int run(CLI::App& app, int argc, char** argv) {
  Options options;
  bool list = false, no_skin_tones = false;
  auto* out = app.add_option("--out", options.out, "Folder to make");
  app.add_flag("--list", list, "Print the groups and subgroups with their sizes")->excludes(out);
  app.add_option("--classes", options.classes,
                 "Classes to write: NAME of a group or subgroup, or NAME=A+B of several; * ends a prefix "
                 "(faces=face-*+cat-face,animals-and-nature). Default: every group")
      ->delimiter(',');
  app.add_option("--except", options.except, "Groups, subgroups or names to leave out")->delimiter(',');
  app.add_flag("--no-skin-tones", no_skin_tones, "Leave out the five skin tones of each person and hand");
  app.add_option("--size", options.size, "Pixels of the white square (bitmaps are not scaled)")
      ->check(CLI::Range(16, 1024))
      ->capture_default_str();
  app.add_option("--font", options.font, "Emoji font with bitmaps")->capture_default_str();
  app.add_option(
         "--annotations", options.annotations,
         "Files of CLDR (annotations/en.xml, annotationsDerived/en.xml): keywords as a second caption")
      ->delimiter(',');
  app.add_option("--emoji-list", options.emoji_list, "Unicode's emoji-test.txt")->capture_default_str();
  app.callback([&] {
    options.skin_tones = !no_skin_tones;
    while (options.out.ends_with('/')) options.out.pop_back();

    const auto emoji = read_emoji_list(options.emoji_list);
    if (list) return list_groups(emoji);
    if (options.out.empty()) fail("demo-data", "--out FOLDER is needed");
    const EmojiFont font(options.font);
    write_pictures(options, choose_pictures(options, emoji, font), font);
  });
  return run_command_line(app, argc, argv);
}

}  // namespace
}  // namespace kiln::demo

int main(int argc, char** argv) {
  CLI::App app{"Writes the colour emoji of a font as class folders of PNG files with metadata.jsonl.",
               "kiln-demo-data"};
  return kiln::demo::run(app, argc, argv);
}
