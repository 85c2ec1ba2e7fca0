// The bound of a step or a pass: the least time in which a machine could compute what the model's definition
// asks for, and where the time above it goes.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "core/page/page.h"
#include "parallel/machine.h"
#include "step/span.h"

namespace kiln {

// What a perfect program would compute and move for one segment. Such a program fuses all of a segment, so
// only weights, training state and what backward needs pass through memory.
struct IdealSegment {
  std::string name;
  double flops = 0;  // of products, convolutions and attention, nothing recomputed and nothing padded
  double bytes = 0;  // read and written
};

// Returns the longer of the arithmetic at the machine's best rate and the bytes at its bandwidth.
double bound_of(const IdealSegment& segment, const MachineRates& rates);
// The same for one operation as it ran.
double bound_of(const OpRecord& op, const MachineRates& rates);

// Returns the rates, or those of the timed operations where a product was faster than any that was measured.
MachineRates raised_by(const std::vector<OpRecord>& ops, MachineRates rates);

// Returns {"seconds": the sum of the segments' bounds, "share": of `measured_s` that they are,
//  "flops", "bytes", "flops_per_s", "bytes_per_s" (of the machine),
//  "segments": [{"name", "flops", "bytes", "seconds"}],
//  "operations": [{"operation", "num", "seconds", "bound_s", "share"}]}.
// `ops`: the timed operations of one step or pass. Those of one name and dtype are a row, longest first, if
// they take more than 1 % of all of them.
nlohmann::json bound_json(const std::vector<IdealSegment>& segments, const MachineRates& measured_rates,
                          const std::vector<OpRecord>& ops, double measured_s);

// Returns the line and the table for a terminal, or adds them to a page.
std::string bound_text(const nlohmann::json& bound);
void add_bound(Page& page, const nlohmann::json& bound);

}  // namespace kiln
