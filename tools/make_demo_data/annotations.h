// Keywords of emoji from Unicode's CLDR: common/annotations/en.xml and common/annotationsDerived/en.xml.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kiln::demo {

// By the emoji's characters in UTF-8 without variation selectors, as CLDR writes them.
using Annotations = std::map<std::string, std::string>;

// Adds a file's keywords, "apple, fruit, red". Throws Error for a file that cannot be read or has none.
void read_annotations(const std::string& path, Annotations& annotations);

// The keywords of an emoji; "" when there are none.
std::string keywords_of(const Annotations& annotations, const std::vector<uint32_t>& code_points);

}  // namespace kiln::demo
