#include "kiln/sample.h"

#include "library/guarded.h"
#include "parallel/ranks/process_group.h"
#include "sample/sample_options.h"

namespace kiln::v0 {

void sample(const SampleRequest& request) {
  guarded([&] {
    SampleCommand command;
    command.weights = request.weights;
    command.autoencoder = request.autoencoder;
    command.num_images = request.num_images;
    command.classes = request.classes;
    command.prompts = request.prompts;
    command.cfg_scale = request.cfg_scale;
    command.sampler = request.sampler;
    command.num_sampling_steps = request.num_sampling_steps;
    command.seed = request.seed;
    command.out = request.out;
    command.device = request.device;
    command.compute_dtype = request.compute_dtype;
    ProcessGroup alone;
    run_sample_command(command, alone);
  });
}

}  // namespace kiln::v0
