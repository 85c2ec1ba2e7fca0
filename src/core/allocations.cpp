#include "core/allocations.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <jemalloc/jemalloc.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <new>
#include <stdexcept>

#include "core/error.h"
#include "core/units.h"

#pragma weak mallocx  // null where jemalloc is not linked
#pragma weak mallctl

namespace kiln {
namespace {

std::atomic<uint64_t> next_id{1};
std::atomic<int64_t> cpu_live{0}, cpu_peak{0};
std::atomic<AllocationObserver*> cpu_observer{nullptr};

// Stands in front of every CPU block. With a header instead of a side table, freeing needs no lock. (c10
// asserts that a raw allocation's context is its data pointer, so the context cannot carry the size.)
struct alignas(64) BlockHeader {
  uint64_t id;
  size_t bytes;
};
static_assert(sizeof(BlockHeader) == 64);

void free_block(void* data) {
  if (!data) return;
  auto* header = static_cast<BlockHeader*>(data) - 1;
  cpu_live.fetch_sub(static_cast<int64_t>(header->bytes), std::memory_order_relaxed);
  if (auto* observer = cpu_observer.load(std::memory_order_acquire))
    observer->freed(header->id, header->bytes);
  c10::free_cpu(header);
}

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Allocates from an arena of large tensors alone. Throws Error.
void* allocate_in_own_arena(size_t bytes) {
  static const unsigned arena = [] {
    unsigned made = 0;
    size_t size = sizeof(made);
    if (mallctl("arenas.create", &made, &size, nullptr, 0) != 0) throw std::bad_alloc();
    return made;
  }();
  void* block =
      mallocx(bytes, MALLOCX_ALIGN(alignof(BlockHeader)) | MALLOCX_ARENA(arena) | MALLOCX_TCACHE_NONE);
  if (!block)
    fail("memory", "there is not enough memory for a tensor of {} GiB",
         gib_text(static_cast<int64_t>(bytes)));
  return block;
}

// Lets the kernel hold a large tensor in huge pages, whose addresses a processor translates faster. The
// kernel makes a huge page resident as a whole: small blocks would fill parts of many, and a long run would
// grow. So with jemalloc nothing else comes to where a large tensor was.
void* allocate_large(size_t bytes) {
  void* block = mallocx ? allocate_in_own_arena(bytes) : c10::alloc_cpu(bytes);
  const auto address = reinterpret_cast<uintptr_t>(block), begin = address / kHugePage * kHugePage,
             end = (address + bytes + kHugePage - 1) / kHugePage * kHugePage;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  return block;
}

class TrackingCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::DeviceType::CPU)};
    const size_t with_header = bytes + sizeof(BlockHeader);
    auto* header = static_cast<BlockHeader*>(bytes < kHugePage ? c10::alloc_cpu(with_header)
                                                               : allocate_large(with_header));
    *header = {next_id.fetch_add(1, std::memory_order_relaxed), bytes};
    const int64_t live = cpu_live.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed) +
                         static_cast<int64_t>(bytes);
    int64_t peak = cpu_peak.load(std::memory_order_relaxed);
    while (live > peak && !cpu_peak.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
    }
    if (auto* observer = cpu_observer.load(std::memory_order_acquire)) observer->allocated(header->id, bytes);
    void* data = header + 1;
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

std::atomic<AllocationObserver*> meta_observer{nullptr};

struct MetaBlock {
  uint64_t id;
  size_t bytes;
};

void free_meta_block(void* context) {
  auto* block = static_cast<MetaBlock*>(context);
  if (auto* observer = meta_observer.load(std::memory_order_acquire))
    observer->freed(block->id, block->bytes);
  delete block;
}

// Hands out null data with a context that remembers the size: the tensors take no memory, but their lifetimes
// are seen.
class TrackingMetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new MetaBlock{next_id.fetch_add(1, std::memory_order_relaxed), bytes};
    if (auto* observer = meta_observer.load(std::memory_order_acquire)) observer->allocated(block->id, bytes);
    return {nullptr, block, &free_meta_block, c10::Device(c10::DeviceType::Meta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
};

constexpr uint8_t kPriority = 255;  // above every allocator that torch registers

}  // namespace

void install_tracking_cpu_allocator() {
  static TrackingCpuAllocator allocator;
  c10::SetAllocator(c10::DeviceType::CPU, &allocator, kPriority);
}

LiveBytes live_cpu_bytes() {
  return {cpu_live.load(std::memory_order_relaxed), cpu_peak.load(std::memory_order_relaxed)};
}

void reset_peak_cpu_bytes() {
  cpu_peak.store(cpu_live.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void observe_cpu_allocations(AllocationObserver* observer) {
  cpu_observer.store(observer, std::memory_order_release);
}

uint64_t block_id(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return 0;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (!data.get_context()) return 0;
  if (data.get_deleter() == &free_block) return (static_cast<BlockHeader*>(data.get_context()) - 1)->id;
  if (data.get_deleter() == &free_meta_block) return static_cast<MetaBlock*>(data.get_context())->id;
  return 0;
}

MetaAllocationScope::MetaAllocationScope(AllocationObserver& observer) {
  static TrackingMetaAllocator allocator;
  static std::once_flag installed;
  std::call_once(installed, [] { c10::SetAllocator(c10::DeviceType::Meta, &allocator, kPriority); });
  if (meta_observer.exchange(&observer, std::memory_order_acq_rel))
    throw std::logic_error("two dry runs at once in one process");
}

MetaAllocationScope::~MetaAllocationScope() { meta_observer.store(nullptr, std::memory_order_release); }

}  // namespace kiln
