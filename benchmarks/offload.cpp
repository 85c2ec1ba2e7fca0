// What an offloaded optimizer is bound by, each piece timed on demand, so that benchmarks/peers/host_adamw.py
// can run them in turn with other programs: a command on standard input, seconds and bytes on standard
// output.
//
//   bench_offload THREADS NVME_PATH      commands: copy streamed_copy adamw fused disk_write disk_read nvme
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <liburing.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>

#include "core/aten.h"
#include "core/error.h"
#include "ops/ops.h"
#include "parallel/zero/flat_unit.h"

namespace kiln {
namespace {

constexpr int64_t kElements = int64_t{1} << 25;                                // of the state in memory
constexpr int64_t kUnits = 8, kUnitElements = int64_t{1} << 22, kUpdates = 2;  // on the disk
constexpr int64_t kDepth = 32, kBlockBytes = 1 << 20, kDiskBytes = int64_t{1} << 29;

struct Amount {
  double seconds = 0;
  int64_t bytes = 0, other_bytes = 0;  // other_bytes: written, where reads and writes are told apart
};

Amount timed(int64_t bytes, const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), bytes};
}

const ops::AdamWStep kStep = {
    .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0, .step = 10, .grad_scale = 1};

struct State {
  explicit State(int64_t n)
      : master(at::randn({n})),
        grad(at::randn({n})),
        exp_avg(at::zeros({n})),
        exp_avg_sq(at::zeros({n})),
        ema(at::zeros({n})),
        compute(at::zeros({n}, at::kBFloat16)) {}
  at::Tensor master, grad, exp_avg, exp_avg_sq, ema, compute;

  void update(bool fused) {
    std::vector<ops::EmaSlice> emas;
    if (fused) emas.push_back({ema, 0.9999});
    ops::adamw_ema_step_(master, grad, exp_avg, exp_avg_sq, emas, fused ? &compute : nullptr, kStep);
  }
  void copy() {
    over_threads([](float* to, const float* from, int64_t count) {
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    });
  }
  // Around the caches, which saves the reading of what is overwritten.
  void streamed_copy() {
    over_threads([](float* to, const float* from, int64_t count) {
      for (int64_t i = 0; i < count; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
      _mm_sfence();
    });
  }

 private:
  void over_threads(void (*copy)(float*, const float*, int64_t)) {
    at::parallel_for(0, grad.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
      copy(ema.mutable_data_ptr<float>() + begin, grad.const_data_ptr<float>() + begin, end - begin);
    });
  }
};

// The disk by itself: one file from beginning to end, with the queue always full.
class Disk {
 public:
  explicit Disk(const std::string& folder) : memory_(at::zeros({kDepth * kBlockBytes + 4096}, at::kByte)) {
    const std::string path = folder + "/.kiln-bench";
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
    unlink(path.c_str());
    if (fd_ < 0 || fallocate(fd_, 0, 0, kDiskBytes) != 0 || io_uring_queue_init(kDepth, &ring_, 0) != 0)
      fail("bench", "{} cannot be measured: {}", folder, std::strerror(errno));
    const auto address = reinterpret_cast<uintptr_t>(memory_.data_ptr());
    data_ = reinterpret_cast<std::byte*>((address + 4095) / 4096 * 4096);
  }
  ~Disk() {
    io_uring_queue_exit(&ring_);
    close(fd_);
  }

  void sweep(bool writes) {
    int64_t sent = 0, done = 0;
    std::vector<int64_t> idle;
    for (int64_t i = 0; i < kDepth; ++i) idle.push_back(i);
    while (done < kDiskBytes) {
      for (; !idle.empty() && sent < kDiskBytes; sent += kBlockBytes, idle.pop_back()) {
        io_uring_sqe* entry = io_uring_get_sqe(&ring_);
        std::byte* block = data_ + idle.back() * kBlockBytes;
        if (writes)
          io_uring_prep_write(entry, fd_, block, kBlockBytes, static_cast<uint64_t>(sent));
        else
          io_uring_prep_read(entry, fd_, block, kBlockBytes, static_cast<uint64_t>(sent));
        io_uring_sqe_set_data64(entry, static_cast<uint64_t>(idle.back()));
      }
      io_uring_submit_and_wait(&ring_, 1);
      for (io_uring_cqe* entry = nullptr; io_uring_peek_cqe(&ring_, &entry) == 0; done += kBlockBytes) {
        if (entry->res != kBlockBytes) fail("bench", "the disk gave {}", entry->res);
        idle.push_back(static_cast<int64_t>(io_uring_cqe_get_data64(entry)));
        io_uring_cqe_seen(&ring_, entry);
      }
    }
  }

 private:
  at::Tensor memory_;
  std::byte* data_ = nullptr;
  int fd_ = -1;
  io_uring ring_{};
};

// Updates as the step makes them, of state on the disk.
class OnDisk {
 public:
  explicit OnDisk(const std::string& folder) : rest_(kUnitElements) {
    FlatUnitOptions options{.compute_dtype = at::kBFloat16,
                            .moments = {{.name = "exp_avg"}, {.name = "exp_avg_sq"}},
                            .num_emas = 1,
                            .placement = {.optimizer = Placement::kNvme}};
    FlatLayout layout;
    layout.add("weights", {kUnitElements});
    options.nvme = nvme_ = std::make_shared<NvmeState>(
        NvmeUnits{.elements = std::vector<int64_t>(kUnits, state_bytes(layout, options)), .dtype = at::kByte},
        NvmeUnits{}, BlockStoreOptions{.folder = folder}, at::kCPU);
    for (; options.nvme_unit < kUnits; ++options.nvme_unit) units_.emplace_back("unit", layout, options);
  }

  Amount update() {
    const int64_t read = nvme_->store()->bytes_read(), written = nvme_->store()->bytes_written();
    Amount amount = timed(0, [&] {
      for (int64_t i = 0; i < kUpdates; ++i) sweep(Access::kWrite);
      sweep(Access::kRead);  // waits for what was written
    });
    amount.bytes = nvme_->store()->bytes_read() - read;
    amount.other_bytes = nvme_->store()->bytes_written() - written;
    return amount;
  }

 private:
  void sweep(Access access) {
    units_.front().prefetch_state();
    for (size_t s = 0; s < units_.size(); ++s) {
      if (s + 1 < units_.size()) units_[s + 1].prefetch_state();
      StateLease lease = units_[s].lease(access);
      if (access == Access::kRead) continue;
      std::vector<ops::EmaSlice> emas = {{lease.emas[0], 0.9999}};
      ops::adamw_ema_step_(lease.master, rest_.grad, lease.moments[0], lease.moments[1], emas,
                           &units_[s].weight_shard, kStep);
    }
  }
  State rest_;
  std::shared_ptr<NvmeState> nvme_;
  std::vector<FlatUnit> units_;
};

void serve(int threads, const std::string& folder) {
  at::set_num_threads(threads);
  State state(kElements);
  Disk disk(folder);
  OnDisk on_disk(folder);
  const std::map<std::string, std::function<Amount()>> commands = {
      {"copy", [&] { return timed(8 * kElements, [&] { state.copy(); }); }},
      {"streamed_copy", [&] { return timed(8 * kElements, [&] { state.streamed_copy(); }); }},
      {"adamw", [&] { return timed(28 * kElements, [&] { state.update(/*fused=*/false); }); }},
      {"fused", [&] { return timed(38 * kElements, [&] { state.update(/*fused=*/true); }); }},
      {"disk_write", [&] { return timed(kDiskBytes, [&] { disk.sweep(/*writes=*/true); }); }},
      {"disk_read", [&] { return timed(kDiskBytes, [&] { disk.sweep(/*writes=*/false); }); }},
      {"nvme", [&] { return on_disk.update(); }}};
  for (std::string command; std::getline(std::cin, command);) {
    const Amount amount = commands.at(command)();
    fmt::print("{} {} {}\n", amount.seconds, amount.bytes, amount.other_bytes);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: bench_offload THREADS NVME_PATH\n");
    return 2;
  }
  try {
    kiln::serve(std::stoi(argv[1]), argv[2]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
