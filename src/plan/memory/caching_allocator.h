// A replay of PyTorch's CUDA caching allocator, so that reserved as well as allocated bytes are predicted.
// Rules: c10/cuda/CUDACachingAllocator.cpp of torch 2.11, default settings.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace kiln {

// Returns the environment's settings of the allocator if they change what it reserves:
// "PYTORCH_CUDA_ALLOC_CONF=expandable_segments: True". Empty if they do not.
std::string unusual_allocator_settings(
    const std::function<const char*(const char* name)>& environment = ::getenv);

class CachingAllocatorReplay {
 public:
  // `capacity_bytes`: memory of the device that is left for segments; 0: unlimited.
  explicit CachingAllocatorReplay(int64_t capacity_bytes = 0) : capacity_bytes_(capacity_bytes) {}

  // Returns false if neither a cached block nor a new segment can serve it, even after cached segments were
  // given back. A segment belongs to the stream it was made for, and only that stream reuses its blocks.
  bool allocate(uint64_t id, int64_t bytes, int64_t stream = 0);
  void free(uint64_t id);

  int64_t allocated_bytes() const { return allocated_; }  // live blocks, rounded to 512 bytes
  int64_t reserved_bytes() const { return reserved_; }    // segments taken from the device
  int64_t peak_allocated_bytes() const { return peak_allocated_; }
  int64_t peak_reserved_bytes() const { return peak_reserved_; }

 private:
  struct Block {
    int64_t stream = 0, segment = 0, offset = 0, size = 0;
    bool small = false, used = false;
    Block *previous = nullptr, *next = nullptr;  // neighbours in the segment
  };
  // Best fit: the smallest block that is large enough, then the lowest address.
  struct BySizeThenAddress {
    bool operator()(const Block* a, const Block* b) const {
      if (a->size != b->size) return a->size < b->size;
      if (a->segment != b->segment) return a->segment < b->segment;
      return a->offset < b->offset;
    }
  };
  using FreeBlocks = std::set<Block*, BySizeThenAddress>;

  Block* take_cached(int64_t size, bool small, int64_t stream);
  Block* new_segment(int64_t size, bool small, int64_t stream);
  void split(Block& block, int64_t size);
  Block* merge(Block* block, Block* neighbour);
  void release_cached_segments();
  FreeBlocks& free_blocks(const Block& block) { return free_[{block.stream, block.small}]; }
  Block* make_block();
  void drop_block(Block* block);

  int64_t capacity_bytes_;
  int64_t allocated_ = 0, reserved_ = 0, peak_allocated_ = 0, peak_reserved_ = 0, next_segment_ = 0;
  std::list<Block> blocks_;
  std::unordered_map<Block*, std::list<Block>::iterator> where_;
  std::unordered_map<uint64_t, Block*> used_;
  std::map<std::pair<int64_t, bool>, FreeBlocks> free_;  // by stream, and whether blocks are small
};

}  // namespace kiln
