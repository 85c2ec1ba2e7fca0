// Counter-based random numbers (Salmon et al. 2011, Philox4x32-10). Every draw is a pure function of (seed,
// purpose, index, element): ranks, micro-batches and resumed runs see the same numbers.
#pragma once
#include <array>
#include <cstdint>
#include <span>

namespace kiln {

// What a draw is for: each purpose has its own stream.
enum class Draw : uint32_t {
  kNoise = 0,     // the forward process' noise of a training sample
  kTimestep = 1,  // u in [0,1) that the objective maps to t
  kLabelDrop = 2,
  kFlip = 3,
  kPosterior = 4,  // sampling an autoencoder's posterior
  kShuffle = 5,
  kInit = 6,         // weights
  kSampleStart = 7,  // x_T of a generated image
  kSampleStep = 8,   // noise of a sampler's step
  kSampleLabel = 9,  // class of a generated image
  kCaption = 10,     // which of a sample's captions
  kTextDrop = 11,
  kAdapterDrop = 12,   // elements that an adapter does not see
  kOffsetNoise = 13,   // what offset noise adds to a channel
  kPerturbation = 14,  // what input perturbation adds to the noise of x_t
  kRounding = 15,      // rounding updated master weights to bf16
};

// One block of Philox4x32-10.
std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Uniform double in [0, 1) with 53 random bits. `index` names the sample, `element` the draw within it.
double philox_uniform(uint64_t seed, Draw draw, uint64_t index, uint32_t element = 0);

// Fills `out` with the words of Philox blocks from block 16 * `first_group` on, in groups of 16 blocks: the
// first words of a group's blocks, then their second ones, and so on. The last group may be cut off.
void philox_words(uint64_t seed, Draw draw, uint64_t index, uint32_t first_group, std::span<uint32_t> out);

// Fills `out` with N(0, 1) draws (Box-Muller on Philox, SIMD). out[j] depends on (seed, draw, index, j) only,
// not on out.size(), and is bitwise the same on every x86-64 SIMD target.
void philox_normal(uint64_t seed, Draw draw, uint64_t index, std::span<float> out);

}  // namespace kiln
