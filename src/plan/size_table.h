// The tables of docs/planning.md and docs/scaling.md, in Markdown: made by the planner, so that they say what
// it says.
#pragma once
#include <string>

namespace kiln {

// "sizes": every published DiT at 256 and 512 pixels. "quoted": the figures that circulate, beside the
// plan's. "scaling": ranks and ZeRO stages. Throws Error naming the tables there are.
std::string markdown_table(const std::string& name);

}  // namespace kiln
