// Unicode's list of emoji: sequences, names, groups.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln::demo {

struct Emoji {
  std::vector<uint32_t> code_points;
  std::string name;             // "grinning face"
  std::string group, subgroup;  // "Smileys & Emotion", "face-smiling"
  // One of five darker or lighter copies of the same picture.
  bool has_skin_tone() const;
  // "1f468-200d-1f373": unique, without variation selectors.
  std::string file_stem() const;
};

// The fully qualified emoji and the components (skin tones, hair) of Unicode's emoji-test.txt. Throws Error.
std::vector<Emoji> read_emoji_list(const std::string& path);

// "Smileys & Emotion" -> "smileys-and-emotion".
std::string class_name_of(const std::string& group);

}  // namespace kiln::demo
