#include "core/error.h"
#include "data/images/image_dataset.h"
#include "data/images/ordered_workers.h"

namespace kiln {

struct ImagePipeline::Impl {
  OrderedWorkers<PreparedImage> workers;
};

ImagePipeline::ImagePipeline(int64_t first, int64_t last, std::function<Image(int64_t)> load, int num_threads,
                             int64_t queue_depth) {
  const auto prepare = [load = std::move(load)](int64_t index) {
    PreparedImage prepared{index, {}, {}};
    try {
      prepared.image = load(index);
    } catch (const Error& error) {
      prepared.error = error.what();
    }
    return prepared;
  };
  impl_.reset(new Impl{{first, last, num_threads, queue_depth, prepare}});
}

ImagePipeline::~ImagePipeline() = default;

bool ImagePipeline::next(PreparedImage& out) {
  auto prepared = impl_->workers.next();
  if (prepared) out = std::move(*prepared);
  return prepared.has_value();
}

}  // namespace kiln
