#include "watch/precision_audit.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"

namespace kiln {

using Json = nlohmann::json;

namespace {

constexpr double kCastShare = 0.05, kProductShare = 0.02;  // shares of the time that bring advice
constexpr double kNearTheEnd = 0.5;                        // share of a dtype's range

bool is_floating(at::ScalarType dtype) { return at::isFloatingType(dtype); }
bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

std::string short_name(at::ScalarType dtype) {
  for (const auto& [known, name] : Choices<at::ScalarType>::kAll)
    if (known == dtype) return name;
  return c10::toString(dtype);
}

bool is_cast(const OpRecord& op) {
  return (op.name == "aten::_to_copy" || op.name == "aten::copy_") && is_floating(op.from) &&
         is_floating(op.dtype) && op.from != op.dtype;
}

bool is_product(const OpRecord& op) { return op.op_class != OpClass::kElementwise; }

// Returns the largest value of a 16-bit dtype. bfloat16 has f32's exponents.
double largest_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? 65504.0 : static_cast<double>(std::numeric_limits<float>::max());
}

// Explains why an operation runs in f32 although the step computes in 16 bits.
std::string reason_of(const OpRecord& op, StepPhase phase) {
  if (is_product(op)) return "its operands are f32: nothing casts them to the compute dtype";
  switch (phase) {
    case StepPhase::kOptimizer:
    case StepPhase::kOffload:
      return "an update is computed in f32";
    case StepPhase::kGradNorm:
      return "sums of squares are f32";
    case StepPhase::kLoss:
    case StepPhase::kInput:
      return "noise, targets and losses are f32";
    default:
      return "norms, softmax and the residual stream stay f32, as under autocast";
  }
}

// Sums over equal operations in one phase of a segment.
struct Sum {
  int64_t num = 0, overflows = 0;
  double bytes = 0, seconds = 0, flops = 0;
  void add(const OpRecord& op, int64_t times) {
    num += times;
    overflows += op.num_overflows * times;
    bytes += op.bytes * static_cast<double>(times);
    seconds += op.seconds * static_cast<double>(times);
    flops += op.flops * static_cast<double>(times);
  }
};

class Audit {
 public:
  explicit Audit(const PrecisionContext& context) : context_(context) {}

  void add(const Span& span) {
    const std::string segment =
        span.segment < 0 ? "" : context_.segments.at(static_cast<size_t>(span.segment));
    const std::string phase(name_of(span.phase));
    for (const OpRecord& op : span.ops) {
      total_.add(op, span.times);
      by_dtype_[op.dtype].add(op, span.times);
      if (is_cast(op)) casts_[{segment, phase, op.name, op.from, op.dtype}].add(op, span.times);
      if (op.dtype == at::kFloat && context_.compute_dtype != at::kFloat && !is_cast(op)) {
        F32& row = f32_[{segment, phase, op.name}];
        row.sum.add(op, span.times);
        row.is_product |= is_product(op);
        row.why = reason_of(op, span.phase);
      }
      if (op.num_overflows > 0)
        overflows_.push_back({{"segment", segment},
                              {"phase", phase},
                              {"operation", op.name},
                              {"dtype", short_name(op.dtype)},
                              {"values", op.num_overflows}});
      if (op.largest > 0) {
        // A product's dtype is that of its operands. With f32 operands, its 16-bit result has the compute
        // dtype.
        double& largest = largest_[{segment, is_16_bit(op.dtype) ? op.dtype : context_.compute_dtype}];
        largest = std::max(largest, op.largest);
      }
    }
  }

  Json result() const {
    Json audit = {{"compute_dtype", short_name(context_.compute_dtype)},
                  {"seconds", total_.seconds},
                  {"num_operations", total_.num},
                  {"by_dtype", Json::array()},
                  {"casts", Json::array()},
                  {"f32", Json::array()},
                  {"overflows", overflows_},
                  {"largest", Json::array()}};
    for (const auto& [dtype, sum] : by_dtype_)
      audit["by_dtype"].push_back({{"dtype", short_name(dtype)},
                                   {"seconds", sum.seconds},
                                   {"share", share(sum.seconds)},
                                   {"num", sum.num},
                                   {"bytes", sum.bytes},
                                   {"flops", sum.flops}});
    for (const auto& [key, sum] : casts_) {
      const auto& [segment, phase, operation, from, to] = key;
      audit["casts"].push_back({{"segment", segment},
                                {"phase", phase},
                                {"operation", operation},
                                {"from", short_name(from)},
                                {"to", short_name(to)},
                                {"num", sum.num},
                                {"bytes", sum.bytes},
                                {"seconds", sum.seconds}});
    }
    for (const auto& [key, row] : f32_) {
      const auto& [segment, phase, operation] = key;
      audit["f32"].push_back({{"segment", segment},
                              {"phase", phase},
                              {"operation", operation},
                              {"is_product", row.is_product},
                              {"num", row.sum.num},
                              {"seconds", row.sum.seconds},
                              {"share", share(row.sum.seconds)},
                              {"why", row.why}});
    }
    for (const auto& [key, value] : largest_)
      if (is_16_bit(key.second))
        audit["largest"].push_back({{"segment", key.first},
                                    {"dtype", short_name(key.second)},
                                    {"value", value},
                                    {"share_of_range", value / largest_of(key.second)}});
    const auto longest_first = [](const Json& a, const Json& b) { return a["seconds"] > b["seconds"]; };
    for (const char* list : {"by_dtype", "casts", "f32"})
      std::ranges::stable_sort(audit[list].get_ref<Json::array_t&>(), longest_first);
    std::ranges::stable_sort(audit["largest"].get_ref<Json::array_t&>(), [](const Json& a, const Json& b) {
      return a["share_of_range"] > b["share_of_range"];
    });
    audit["advice"] = advice(audit);
    return audit;
  }

 private:
  double share(double seconds) const { return total_.seconds > 0 ? seconds / total_.seconds : 0; }

  static std::string place_of(const Json& row) {
    const auto segment = row.at("segment").get<std::string>();
    return segment.empty() ? row.at("phase").get<std::string>()
                           : fmt::format("{} of {}", row.at("phase").get<std::string>(), segment);
  }

  std::vector<std::string> advice(const Json& audit) const {
    std::vector<std::string> sentences;
    if (context_.compute_dtype == at::kFloat)
      sentences.push_back("the step computes in f32: --compute-dtype bf16 lets products run in 16 bits");
    for (const Json& row : audit["f32"])
      if (row.at("is_product") && row.at("share").get<double>() > kProductShare)
        sentences.push_back(
            fmt::format("{} in the {} multiplies f32 for {:.1f} % of the time: cast its operands to {}",
                        row.at("operation").get<std::string>(), place_of(row),
                        100 * row.at("share").get<double>(), short_name(context_.compute_dtype)));
    double cast_seconds = 0;
    for (const Json& row : audit["casts"]) cast_seconds += row.at("seconds").get<double>();
    if (share(cast_seconds) > kCastShare)
      sentences.push_back(
          fmt::format("casts take {:.1f} % of the time, most of it {} in the {}: keep that value in one "
                      "dtype",
                      100 * share(cast_seconds), audit["casts"][0].at("operation").get<std::string>(),
                      place_of(audit["casts"][0])));
    if (!audit["overflows"].empty()) {
      const Json& first = audit["overflows"][0];
      const bool is_half = context_.compute_dtype == at::kHalf;
      sentences.push_back(fmt::format(
          "values overflow first at {} in the {}{}", first.at("operation").get<std::string>(),
          place_of(first),
          is_half
              ? ": fp16 ends at 65504; in a backward the loss scale is lowered for it, in a forward take bf16"
              : ": look at its inputs and at the learning rate"));
    }
    for (const Json& row : audit["largest"])
      if (row.at("dtype") == short_name(at::kHalf) && row.at("share_of_range").get<double>() > kNearTheEnd)
        sentences.push_back(fmt::format("values of {} in {} reach {:.0f} % of {}'s range: bf16 has more",
                                        row.at("value").get<double>(), row.at("segment").get<std::string>(),
                                        100 * row.at("share_of_range").get<double>(),
                                        row.at("dtype").get<std::string>()));
    return sentences;
  }

  struct F32 {
    Sum sum;
    bool is_product = false;
    std::string why;
  };
  const PrecisionContext& context_;
  Sum total_;
  std::map<at::ScalarType, Sum> by_dtype_;
  std::map<std::tuple<std::string, std::string, std::string, at::ScalarType, at::ScalarType>, Sum> casts_;
  std::map<std::tuple<std::string, std::string, std::string>, F32> f32_;
  Json overflows_ = Json::array();
  std::map<std::pair<std::string, at::ScalarType>, double> largest_;
};

}  // namespace

Json audit_precision(const std::vector<Span>& spans, const PrecisionContext& context) {
  Audit audit(context);
  for (const Span& span : spans) audit.add(span);
  return audit.result();
}

}  // namespace kiln
