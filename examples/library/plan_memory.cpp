// Plans a model on a GPU, without one, and prints what its memory holds.
//   plan_memory [MODEL [GPU]]
#include <kiln/plan.h>
#include <kiln/version.h>

#include <cstdio>

int main(int argc, char** argv) {
  const std::string model = argc > 1 ? argv[1] : "DiT-XL/2", gpu = argc > 2 ? argv[2] : "A100-80G";
  try {
    const kiln::v0::Plan plan = kiln::v0::plan(
        {.options = {{"model", model}, {"global-batch", 64}, {"compute-dtype", "bf16"}}, .gpu = gpu});
    constexpr double kGiB = 1 << 30;
    std::printf("Kiln %s: %s on %s %s\n", KILN_VERSION, model.c_str(), gpu.c_str(),
                plan.fits ? "fits" : "does not fit");
    std::printf("needed %.2f of %.2f GiB, tensors at the peak %.2f GiB:\n",
                static_cast<double>(plan.needed_bytes) / kGiB, static_cast<double>(plan.memory_bytes) / kGiB,
                static_cast<double>(plan.peak_bytes) / kGiB);
    for (const auto& [kind, bytes] : plan.bytes_by_kind)
      std::printf("  %-12s %8.2f GiB\n", kind.c_str(), static_cast<double>(bytes) / kGiB);
    std::printf("%.1f images/s\n", plan.images_per_second);
  } catch (const kiln::v0::Error& error) {
    std::fprintf(stderr, "plan_memory: %s\n", error.what());
    return 1;
  }
  return 0;
}
