// What kiln check-data says: as text, as JSON, and as a page with pictures.
#include <algorithm>

#include "core/error.h"
#include "core/page/page.h"
#include "core/text/printable.h"
#include "core/text/some_of.h"
#include "core/units.h"
#include "extract/check_data.h"

namespace kiln {

namespace {

constexpr size_t kMostPictures = 12;  // of a finding, on the page
constexpr int64_t kThumbnailSide = 192;

struct FindingText {
  Finding finding;
  const char *title, *advice;
};
constexpr FindingText kTexts[] = {
    {Finding::kBroken, "Broken", "extraction leaves them out"},
    {Finding::kSmall, "Too small", "extraction leaves them out, unless --enlarge is given"},
    {Finding::kCopy, "Copies", "an earlier picture has the same bytes"},
    {Finding::kSimilar, "Similar", "an earlier picture looks the same"},
    {Finding::kBlurred, "Blurred", "their sharpness is below --blurred-below"},
    {Finding::kExtension, "Wrong extension",
     "they are read by their content; other programs may refuse them"},
    {Finding::kColors, "Odd colors", "they are read otherwise than their files mean"},
    {Finding::kNoCaption, "Without a caption", "they are trained with the empty caption"},
    {Finding::kCutCaption, "Captions cut", "the encoder does not see their ends"}};

// Returns those of a finding, in the order of the data set.
std::vector<FoundPicture> found_of(const CheckedData& data, Finding finding) {
  std::vector<FoundPicture> found;
  std::ranges::copy_if(data.found, std::back_inserter(found),
                       [&](const FoundPicture& of) { return of.finding == finding; });
  return found;
}

std::vector<std::string> messages_of(const std::vector<FoundPicture>& found) {
  std::vector<std::string> messages;
  for (const FoundPicture& of : found) messages.push_back(printable(of.why));
  return messages;
}

const std::vector<std::string>& bucket_columns() {
  static const std::vector<std::string> columns = {"size",    "pictures",  "of them enlarged",
                                                   "cut off", "too small", "broken"};
  return columns;
}
std::vector<std::vector<std::string>> bucket_rows(const CheckedData& data) {
  std::vector<std::vector<std::string>> rows;
  for (const CheckedBucket& row : data.buckets)
    rows.push_back({fmt::format("{}x{}", row.bucket.height, row.bucket.width), std::to_string(row.num_taken),
                    std::to_string(row.num_enlarged), fmt::format("{:.1f} %", 100 * row.cut_share),
                    std::to_string(row.num_small), std::to_string(row.num_broken)});
  return rows;
}

std::string captions_text(const CheckedCaptions& captions) {
  if (captions.num_captions == 0) return "";
  if (captions.max_tokens == 0)
    return fmt::format("{} captions; --text-encoder FOLDER shows how many are cut", captions.num_captions);
  return fmt::format("{} captions, of which {} are cut to {} tokens: {:.1f} % of all tokens are lost",
                     captions.num_captions, captions.num_cut, captions.max_tokens,
                     100 * static_cast<double>(captions.num_lost_tokens) /
                         static_cast<double>(std::max<int64_t>(captions.num_tokens, 1)));
}

std::string verdict(const CheckedData& data) {
  if (!data.no_buckets.empty()) return data.no_buckets;
  return fmt::format("kiln extract takes {} of {} pictures", num_taken(data), data.dataset->records().size());
}

std::string thumbnail(const CheckedData& data, const CheckOptions& options, int64_t picture) {
  Image image = data.dataset->load(picture, options.extract.exif_orientation == "apply");
  const int64_t side = std::max(image.height, image.width);
  if (side > kThumbnailSide)
    image = resize_bicubic(image, std::max<int64_t>(image.height * kThumbnailSide / side, 1),
                           std::max<int64_t>(image.width * kThumbnailSide / side, 1));
  const std::vector<uint8_t> png = encode_png(image);
  return embedded({reinterpret_cast<const char*>(png.data()), png.size()});
}

// Adds some pictures of a finding, each with the earlier one that it is like.
void add_pictures(const CheckedData& data, const CheckOptions& options,
                  const std::vector<FoundPicture>& found, Page& page) {
  for (size_t i = 0; i < std::min(found.size(), kMostPictures); ++i) {
    const FoundPicture& of = found[i];
    try {
      page.picture(thumbnail(data, options, of.picture), of.why);
    } catch (const Error&) {  // it is broken
      page.item(of.why);
    }
    if (of.like >= 0)
      page.picture(thumbnail(data, options, of.like),
                   data.dataset->records()[static_cast<size_t>(of.like)].name);
  }
}

}  // namespace

std::string to_text(const CheckedData& data, const CheckOptions& options) {
  std::string text =
      fmt::format("{}: {} pictures ({}), {} MB\n", options.extract.data, data.dataset->records().size(),
                  data.dataset->layout(), number_text(static_cast<double>(data.num_bytes) / 1e6, 3));
  for (const FindingText& kind : kTexts) {
    const std::vector<FoundPicture> found = found_of(data, kind.finding);
    if (!found.empty())
      text += fmt::format("{:>9}  {}, {}: {}\n", found.size(), choice_name(kind.finding), kind.advice,
                          some_of(messages_of(found), "; "));
  }
  if (const std::string captions = captions_text(data.captions); !captions.empty()) text += captions + "\n";
  std::vector<std::vector<std::string>> rows = bucket_rows(data);
  rows.insert(rows.begin(), bucket_columns());
  for (const std::vector<std::string>& row : rows) {
    for (size_t i = 0; i < row.size(); ++i)
      text += fmt::format("{:>{}}", row[i], 2 + std::max<size_t>(bucket_columns()[i].size(), 9));
    text += '\n';
  }
  return text + verdict(data) + "\n";
}

nlohmann::json to_json(const CheckedData& data) {
  const auto name_of = [&](int64_t picture) {
    return printable(data.dataset->records()[static_cast<size_t>(picture)].name);
  };
  nlohmann::json found = nlohmann::json::array(), buckets = nlohmann::json::array();
  for (const FoundPicture& of : data.found) {
    found.push_back(
        {{"picture", name_of(of.picture)}, {"finding", choice_name(of.finding)}, {"why", printable(of.why)}});
    if (of.like >= 0) found.back()["like"] = name_of(of.like);
  }
  for (const CheckedBucket& row : data.buckets)
    buckets.push_back({{"height", row.bucket.height},
                       {"width", row.bucket.width},
                       {"taken", row.num_taken},
                       {"enlarged", row.num_enlarged},
                       {"cut_share", row.cut_share},
                       {"small", row.num_small},
                       {"broken", row.num_broken}});
  return {{"pictures", data.dataset->records().size()},
          {"bytes", data.num_bytes},
          {"taken", num_taken(data)},
          {"verdict", verdict(data)},
          {"found", std::move(found)},
          {"buckets", std::move(buckets)},
          {"captions",
           {{"count", data.captions.num_captions},
            {"max_tokens", data.captions.max_tokens},
            {"cut", data.captions.num_cut},
            {"tokens", data.captions.num_tokens},
            {"lost_tokens", data.captions.num_lost_tokens}}}};
}

std::string to_html(const CheckedData& data, const CheckOptions& options) {
  Page page("Pictures of " + options.extract.data);
  page.text(verdict(data), "verdict");
  page.text(captions_text(data.captions));
  for (const FindingText& kind : kTexts)
    if (const size_t count = found_of(data, kind.finding).size(); count > 0)
      page.figure(std::to_string(count), kind.title);
  page.section("What each size gets and loses");
  page.table(bucket_columns(), bucket_rows(data));
  for (const FindingText& kind : kTexts) {
    const std::vector<FoundPicture> found = found_of(data, kind.finding);
    if (found.empty()) continue;
    page.section(kind.title);
    page.text(fmt::format("{} picture{}: {}{}", found.size(), found.size() == 1 ? "" : "s", kind.advice,
                          found.size() > kMostPictures ? fmt::format("; the first {}:", kMostPictures) : ""));
    add_pictures(data, options, found, page);
  }
  return page.html();
}

}  // namespace kiln
