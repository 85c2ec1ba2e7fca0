#include "plan/memory/caching_allocator.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "core/flat_layout.h"
#include "core/units.h"

namespace kiln {
namespace {

constexpr int64_t kRounding = 512;     // blocks are multiples of this
constexpr int64_t kSmallBlock = kMiB;  // blocks up to this come from the small pool
constexpr int64_t kSmallSegment = 2 * kMiB;
constexpr int64_t kLargeSegment = 20 * kMiB;
constexpr int64_t kOwnSegment = 10 * kMiB;  // from here on a block gets a segment of its own size
constexpr int64_t kSegmentRounding = 2 * kMiB;

int64_t segment_size(int64_t size) {
  if (size <= kSmallBlock) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : round_up(size, kSegmentRounding);
}

// A rest is split off only when it can serve another request of its pool.
bool worth_splitting(int64_t rest, bool small) { return small ? rest >= kRounding : rest > kSmallBlock; }

// True for a default, such as "expandable_segments:False", and for a setting that does not change what is
// reserved.
bool is_usual(std::string setting) {
  std::erase(setting, ' ');
  constexpr std::string_view kUsual[] = {"",
                                         "backend:native",
                                         "expandable_segments:False",
                                         "garbage_collection_threshold:0",
                                         "roundup_power2_divisions:0",
                                         "roundup_power2_divisions:1"};
  // These settings concern pinned memory, or how memory is taken.
  constexpr std::string_view kElsewhere[] = {"pinned_", "release_lock_on_cudamalloc"};
  return std::ranges::find(kUsual, setting) != std::end(kUsual) ||
         std::ranges::any_of(kElsewhere, [&](std::string_view name) { return setting.starts_with(name); });
}

}  // namespace

std::string unusual_allocator_settings(const std::function<const char*(const char* name)>& environment) {
  // The newer name goes first, as in c10/core/AllocatorConfig.
  for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    const char* value = environment(name);
    if (!value) continue;
    std::istringstream settings(value);
    for (std::string setting; std::getline(settings, setting, ',');)
      if (!is_usual(setting)) return fmt::format("{}={}", name, value);
    return "";
  }
  return "";
}

bool CachingAllocatorReplay::allocate(uint64_t id, int64_t bytes, int64_t stream) {
  if (bytes == 0) return true;
  const int64_t size = round_up(bytes, kRounding);
  const bool small = size <= kSmallBlock;
  Block* block = take_cached(size, small, stream);
  if (!block) block = new_segment(size, small, stream);
  if (!block) {
    release_cached_segments();
    block = new_segment(size, small, stream);
  }
  if (!block) return false;
  if (worth_splitting(block->size - size, small)) split(*block, size);
  block->used = true;
  used_[id] = block;
  allocated_ += block->size;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  return true;
}

void CachingAllocatorReplay::free(uint64_t id) {
  const auto found = used_.find(id);
  if (found == used_.end()) return;
  Block* block = found->second;
  used_.erase(found);
  allocated_ -= block->size;
  block->used = false;
  if (block->previous && !block->previous->used) block = merge(block->previous, block);
  if (block->next && !block->next->used) block = merge(block, block->next);
  free_blocks(*block).insert(block);
}

CachingAllocatorReplay::Block* CachingAllocatorReplay::take_cached(int64_t size, bool small, int64_t stream) {
  Block wanted{.stream = stream, .segment = -1, .size = size, .small = small};
  FreeBlocks& pool = free_blocks(wanted);
  const auto found = pool.lower_bound(&wanted);
  if (found == pool.end()) return nullptr;
  Block* block = *found;
  pool.erase(found);
  return block;
}

CachingAllocatorReplay::Block* CachingAllocatorReplay::new_segment(int64_t size, bool small, int64_t stream) {
  const int64_t bytes = segment_size(size);
  if (capacity_bytes_ > 0 && reserved_ + bytes > capacity_bytes_) return nullptr;
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  Block* block = make_block();
  *block = {.stream = stream, .segment = next_segment_++, .size = bytes, .small = small};
  return block;
}

void CachingAllocatorReplay::split(Block& block, int64_t size) {
  Block* rest = make_block();
  *rest = {.stream = block.stream,
           .segment = block.segment,
           .offset = block.offset + size,
           .size = block.size - size,
           .small = block.small,
           .previous = &block,
           .next = block.next};
  if (block.next) block.next->previous = rest;
  block.next = rest;
  block.size = size;
  free_blocks(block).insert(rest);
}

// Merges two neighbours, at least one of them in the free list, into the first one.
CachingAllocatorReplay::Block* CachingAllocatorReplay::merge(Block* block, Block* neighbour) {
  free_blocks(*block).erase(block);
  free_blocks(*block).erase(neighbour);
  block->size += neighbour->size;
  block->next = neighbour->next;
  if (block->next) block->next->previous = block;
  drop_block(neighbour);
  return block;
}

void CachingAllocatorReplay::release_cached_segments() {
  for (auto& [key, pool] : free_) {
    for (auto it = pool.begin(); it != pool.end();) {
      Block* block = *it;
      const bool whole_segment = !block->previous && !block->next;
      it = whole_segment ? pool.erase(it) : std::next(it);
      if (!whole_segment) continue;
      reserved_ -= block->size;
      drop_block(block);
    }
  }
}

CachingAllocatorReplay::Block* CachingAllocatorReplay::make_block() {
  blocks_.emplace_back();
  Block* block = &blocks_.back();
  where_[block] = std::prev(blocks_.end());
  return block;
}

void CachingAllocatorReplay::drop_block(Block* block) {
  const auto found = where_.find(block);
  blocks_.erase(found->second);
  where_.erase(found);
}

}  // namespace kiln
