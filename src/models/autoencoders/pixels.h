// No autoencoder: small pictures are their own latents.
#pragma once
#include "models/autoencoders/autoencoder.h"

namespace kiln {

class Pixels : public Autoencoder {
 public:
  Pixels();
  at::Tensor encode(const at::Tensor& images) const override { return images; }
  at::Tensor decode(const at::Tensor& raw_latents) const override { return raw_latents; }
  const ParameterList& parameters() const override { return parameters_; }

 private:
  ParameterList parameters_;  // none
};

}  // namespace kiln
