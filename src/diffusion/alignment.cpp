#include "diffusion/alignment.h"

#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "models/parts/embeddings.h"
#include "models/parts/layers.h"

namespace kiln {
namespace {

constexpr double kLeastSquares = 1e-16;  // of the two lengths multiplied

// Turns tokens (B, N, D) into patches (B, N, C * p * p).
class Projector : public Segment {
 public:
  Projector(int64_t width, int64_t patch_elements, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype) {
    name_ = "projector";
    const ParameterScope scope = ParameterScope(parameters_, options).under(name_);
    first_ = scope.xavier_linear("0", width, width);
    second_ = scope.xavier_linear("2", width, width);
    last_ = scope.xavier_linear("4", width, patch_elements);
  }

  State forward(const State& state, const ModelInput&) const override {
    const at::Tensor once = at::silu(first_.forward(state.hidden, compute_dtype_));
    const at::Tensor twice = at::silu(second_.forward(once, compute_dtype_));
    return {.hidden = last_.forward(twice, compute_dtype_)};
  }

 private:
  at::ScalarType compute_dtype_;
  Linear first_, second_, last_;
};

// (B, N, D) each -> (B, N)
at::Tensor cosines(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor squares = a.square().sum(-1) * b.square().sum(-1);
  return (a * b).sum(-1) * (squares + kLeastSquares).rsqrt();
}

class AlignedObjective : public Objective {
 public:
  AlignedObjective(std::unique_ptr<Objective> inner, double weight, const Denoiser& denoiser,
                   const BuildOptions& options)
      : inner_(std::move(inner)),
        weight_(weight),
        tap_(denoiser.segments().size() / 3),
        patch_size_(denoiser.shape().tokens.patch_size),
        projector_(denoiser.shape().tokens.width, denoiser.shape().in_channels * patch_size_ * patch_size_,
                   options) {}

  at::Tensor timesteps(const at::Tensor& u) const override { return inner_->timesteps(u); }
  NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                        const at::Tensor& timesteps) const override {
    return inner_->add_noise(x_0, noise, timesteps);
  }
  at::Tensor position(const at::Tensor& timesteps) const override { return inner_->position(timesteps); }
  bool learns_sigma() const override { return inner_->learns_sigma(); }
  bool compares_samples() const override { return inner_->compares_samples(); }
  std::vector<size_t> taps() const override { return {tap_}; }
  const Segment* head() const override { return &projector_; }

  std::vector<std::string> term_names() const override {
    std::vector<std::string> names = inner_->term_names();
    names.emplace_back("align");
    return names;
  }

  LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                 const NoisedBatch& noised) const override {
    LossTerms found = inner_->loss(prediction, x_0, noise, noised);
    if (noised.taps.empty()) return found;
    const at::Tensor projected = projector_.forward({.hidden = noised.taps.front()}, {}).hidden;
    const at::Tensor patches = nn::patchify(x_0, patch_size_);
    found.terms.push_back(1 - cosines(projected.to(at::kFloat), patches).mean(-1));
    found.loss = found.loss + weight_ * found.terms.back();
    return found;
  }

 private:
  std::unique_ptr<Objective> inner_;
  double weight_;
  size_t tap_;
  int64_t patch_size_;
  Projector projector_;
};

}  // namespace

std::unique_ptr<Objective> with_alignment(std::unique_ptr<Objective> objective, double weight,
                                          const Denoiser& denoiser, const BuildOptions& options) {
  if (denoiser.shape().tokens.width == 0)
    fail("train",
         "--align-weight compares a token with each patch of a picture, and this model has other blocks: "
         "leave it out");
  return std::make_unique<AlignedObjective>(std::move(objective), weight, denoiser, options);
}

}  // namespace kiln
