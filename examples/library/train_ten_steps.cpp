// Trains a small DiT for ten steps on batches that this program makes, and writes its weights.
//   train_ten_steps [WEIGHTS.safetensors]
#include <kiln/step.h>

#include <cstdio>
#include <random>

namespace {

// Latents of four classes: each class is a level of its own, with noise.
class Levels : public kiln::v0::BatchSource {
 public:
  explicit Levels(const kiln::v0::Trainer::Shape& shape) : shape_(shape) {}

  kiln::v0::Batch next() override {
    kiln::v0::Batch batch;
    const int64_t elements = shape_.channels * shape_.height * shape_.width;
    std::normal_distribution<float> around(0, 0.1F);
    for (int64_t row = 0; row < shape_.rows; ++row) {
      const int64_t label = row % shape_.num_classes;
      batch.class_labels.push_back(label);
      for (int64_t i = 0; i < elements; ++i)
        batch.x_0.push_back(static_cast<float>(label) - 1.5F + around(random_));
    }
    return batch;
  }

 private:
  kiln::v0::Trainer::Shape shape_;
  std::mt19937 random_{1};
};

}  // namespace

int main(int argc, char** argv) {
  try {
    kiln::v0::Trainer trainer({{"model", "dit"},
                               {"hidden-size", 48},
                               {"depth", 2},
                               {"num-heads", 3},
                               {"patch-size", 2},
                               {"image-size", 64},
                               {"num-classes", 4},
                               {"global-batch", 8},
                               {"max-steps", 10},
                               {"lr", 1e-3},
                               {"device", "cpu"}});
    Levels levels(trainer.shape());
    trainer.train(levels, 10, [](const kiln::v0::StepResult& done) {
      std::printf("step %2lld  loss %.5f  gradient %.4f\n", static_cast<long long>(done.step), done.loss,
                  done.grad_norm);
    });
    const char* path = argc > 1 ? argv[1] : "ten_steps.safetensors";
    trainer.save_weights(path);
    std::printf("%s\n", path);
  } catch (const kiln::v0::Error& error) {
    std::fprintf(stderr, "train_ten_steps: %s\n", error.what());
    return 1;
  }
  return 0;
}
