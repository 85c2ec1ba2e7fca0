// How fast the ranks of a CPU exchange tensors.
#pragma once

namespace kiln {

struct RankLinks {
  double hop_s = 0;        // of one message
  double bytes_per_s = 0;  // that a rank of a ring sends
};

// Measures two ranks in this process, connected as those of a run are, for about a second. REQUIRES: nothing
// in this process has used c10d.
RankLinks measure_rank_links();

}  // namespace kiln
