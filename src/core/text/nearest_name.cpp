#include "core/text/nearest_name.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <tuple>
#include <utility>

namespace kiln {

namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

// Returns how many characters to insert, remove, replace or swap with their neighbour, but 1 if b contains a,
// whatever their lengths.
size_t edit_distance(std::string_view a, std::string_view b) {
  if (a == b) return 0;
  if (!a.empty() && b.find(a) != std::string_view::npos) return 1;
  std::vector<size_t> before, last, row(b.size() + 1);  // rows of the table of distances of prefixes
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::move(last);
    last = row;
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

// Returns the words of an option's name.
std::vector<std::string> words_of(std::string_view name) {
  std::vector<std::string> words(1);
  for (const char c : lower(name))
    if (c != '-' && c != '_')
      words.back() += c;
    else if (!words.back().empty())
      words.emplace_back();
  if (words.back().empty()) words.pop_back();
  return words;
}

// Whether one may stand for the other: a slip in four letters, or the beginning of a word.
bool are_alike(const std::string& word, const std::string& other) {
  constexpr size_t kLettersOfSlip = 4, kLeastBeginning = 3;
  const size_t shorter = std::min(word.size(), other.size());
  if (shorter >= kLeastBeginning && (word.starts_with(other) || other.starts_with(word))) return true;
  return word == other ||
         (shorter >= kLettersOfSlip && edit_distance(word, other) * kLettersOfSlip <= shorter);
}

// Whether each of the words has its like among the others.
bool are_among(const std::vector<std::string>& words, const std::vector<std::string>& others) {
  return !words.empty() && std::ranges::all_of(words, [&](const std::string& word) {
    return std::ranges::any_of(others, [&](const std::string& other) { return are_alike(word, other); });
  });
}

}  // namespace

std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& names,
                                       size_t count) {
  const std::string wanted = lower(name);
  std::vector<std::pair<size_t, size_t>> ranked;
  for (size_t i = 0; i < names.size(); ++i) ranked.emplace_back(edit_distance(wanted, lower(names[i])), i);
  std::ranges::sort(ranked);
  std::vector<std::string> nearest;
  for (size_t i = 0; i < std::min(count, ranked.size()); ++i) nearest.push_back(names[ranked[i].second]);
  return nearest;
}

std::vector<std::string> similar_names(std::string_view name, const std::vector<std::string>& names,
                                       size_t count) {
  constexpr size_t kMostEdits = 3;
  const std::vector<std::string> wanted = words_of(name);
  const std::string whole = fmt::format("{}", fmt::join(wanted, "-"));
  const size_t most_edits = whole.size() < 2 ? 0 : std::clamp<size_t>(whole.size() / 3, 1, kMostEdits);
  std::vector<std::tuple<int, size_t, size_t>> ranked;  // kind of likeness, distance, place
  for (size_t i = 0; i < names.size(); ++i) {
    const std::vector<std::string> words = words_of(names[i]);
    const std::string other = fmt::format("{}", fmt::join(words, "-"));
    if (const size_t edits = edit_distance(whole, other);
        edits <= most_edits && other.size() <= whole.size() + most_edits)
      ranked.emplace_back(0, edits, i);
    else if (are_among(wanted, words))
      ranked.emplace_back(1, words.size(), i);
    else if (are_among(words, wanted))
      ranked.emplace_back(2, wanted.size() - std::min(words.size(), wanted.size()), i);
  }
  std::ranges::sort(ranked);
  std::vector<std::string> similar;
  for (const auto& [kind, distance, place] : ranked) {
    const auto& [best_kind, best_distance, best_place] = ranked.front();
    if (similar.size() == count || kind != best_kind || (kind == 0 && distance != best_distance)) break;
    similar.push_back(names[place]);
  }
  return similar;
}

size_t num_edits(std::string_view name, std::string_view other) {
  return edit_distance(lower(name), lower(other));
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& names) {
  const std::vector<std::string> nearest = nearest_names(name, names, 1);
  return nearest.empty() ? "" : nearest.front();
}

}  // namespace kiln
