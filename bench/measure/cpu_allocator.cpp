// A CPU allocator for torch that counts: live bytes and their peak, over all threads, as CUDA's allocator does.
//
// It wraps torch's own allocator and keeps each block's size in a header in front of it. The profiler's memory events
// would be an alternative, but they miss memory that other threads free (gloo's do), and profiling slows steps down.
//
// After `zeroscale_imitate`, it counts the blocks that CUDA's caching allocator would use for the same requests, and
// the segments that it would reserve for them. It follows torch 2.13's c10/cuda/CUDACachingAllocator.cpp with the
// default settings. All requests are on one stream: requests on other streams would have segments of their own.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t kHeader = 64;  // torch aligns blocks to 64 bytes; the header keeps them so

struct Header {
  size_t size;     // counted bytes; 0: not counted
  size_t request;  // number of the request in `Imitation`; SIZE_MAX: none
};

std::atomic<long long> live{0};
std::atomic<long long> peak{0};
std::atomic<bool> counting{true};
c10::Allocator* inner = nullptr;

constexpr size_t kMiB = 1 << 20;

// One block of a segment. Segments are divided into blocks. Neighbours that are free are merged.
struct Block {
  size_t address, size;
  bool free, small;
  Block *before, *after;  // neighbours in the segment
};

struct BySize {
  using is_transparent = void;
  bool operator()(const Block* one, const Block* other) const {
    return std::make_pair(one->size, one->address) < std::make_pair(other->size, other->address);
  }
  bool operator()(const Block* one, size_t size) const { return one->size < size; }
};

// CUDA's caching allocator on a device with `limit` bytes. It has addresses and no memory.
class CachingAllocator {
 public:
  explicit CachingAllocator(long long limit) : limit_(limit) {}

  // Returns the block of a request, or null if the device is out of memory.
  Block* allocate(size_t requested) {
    const size_t size = requested < 512 ? 512 : (requested + 511) / 512 * 512;
    const bool small = size <= kMiB;
    Pool& pool = pools_[small];
    Block* block;
    if (auto found = pool.lower_bound(size); found != pool.end()) {  // the smallest free block that suffices
      block = *found;
      pool.erase(found);
    } else if (!(block = reserve(size, small))) {
      return nullptr;
    }
    const size_t rest = block->size - size;
    if (small ? rest >= 512 : rest > kMiB) {
      Block* free = create({block->address + size, rest, true, small, block, block->after});
      if (block->after) block->after->before = free;
      block->after = free;
      block->size = size;
      pool.insert(free);
    }
    block->free = false;
    live += static_cast<long long>(block->size);
    if (live > peak) peak = live;
    return block;
  }

  void release(Block* block) {
    Pool& pool = pools_[block->small];
    live -= static_cast<long long>(block->size);
    if (Block* before = block->before; before && before->free) {
      pool.erase(before);
      block->address = before->address;
      block->size += before->size;
      block->before = before->before;
      if (block->before) block->before->after = block;
      destroy(before);
    }
    if (Block* after = block->after; after && after->free) {
      pool.erase(after);
      block->size += after->size;
      block->after = after->after;
      if (block->after) block->after->before = block;
      destroy(after);
    }
    block->free = true;
    pool.insert(block);
  }

  void forget_peaks() {
    peak = live;
    reserved_peak = reserved;
  }

  long long live = 0, peak = 0, reserved = 0, reserved_peak = 0, most_reserved = 0;

 private:
  using Pool = std::set<Block*, BySize>;

  Block* reserve(size_t size, bool small) {
    constexpr size_t kStep = 2 * kMiB;
    const size_t segment = small ? kStep : size < 10 * kMiB ? 20 * kMiB : (size + kStep - 1) / kStep * kStep;
    const long long bytes = static_cast<long long>(segment);
    if (reserved + bytes > limit_) give_back();
    if (reserved + bytes > limit_) return nullptr;
    reserved += bytes;
    if (reserved > reserved_peak) reserved_peak = reserved;
    if (reserved > most_reserved) most_reserved = reserved;
    Block* block = create({next_, segment, false, small, nullptr, nullptr});
    next_ += segment + kMiB;  // segments are never neighbours
    return block;
  }

  // Gives all segments without a used block back to the device, as CUDA's allocator does before it fails.
  void give_back() {
    for (Pool& pool : pools_) {
      for (auto at = pool.begin(); at != pool.end();) {
        Block* block = *at;
        const bool whole = !block->before && !block->after;
        at = whole ? pool.erase(at) : std::next(at);
        if (whole) {
          reserved -= static_cast<long long>(block->size);
          destroy(block);
        }
      }
    }
  }

  Block* create(Block block) {
    if (unused_.empty()) return blocks_.emplace_back(std::make_unique<Block>(block)).get();
    Block* reused = unused_.back();
    unused_.pop_back();
    *reused = block;
    return reused;
  }
  void destroy(Block* block) { unused_.push_back(block); }

  Pool pools_[2];
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> unused_;
  long long limit_;
  size_t next_ = 0;
};

// All requests so far, for a device without limit and to repeat them on a device with less memory.
class Imitation {
 public:
  size_t request(size_t size) {
    std::lock_guard<std::mutex> held(lock_);
    const size_t number = blocks_.size();
    blocks_.push_back(device.allocate(size));
    events_.push_back({number, size});
    return number;
  }
  void release(size_t number) {
    std::lock_guard<std::mutex> held(lock_);
    device.release(blocks_[number]);
    events_.push_back({number, 0});
  }
  bool suffices(long long limit) {
    std::lock_guard<std::mutex> held(lock_);
    CachingAllocator other(limit);
    std::vector<Block*> blocks(blocks_.size());
    for (const auto& [number, size] : events_) {
      if (!size) {
        other.release(blocks[number]);
      } else if (!(blocks[number] = other.allocate(size))) {
        return false;
      }
    }
    return true;
  }
  void forget_peaks() {
    std::lock_guard<std::mutex> held(lock_);
    device.forget_peaks();
  }

  CachingAllocator device{INT64_MAX};

 private:
  std::mutex lock_;
  std::vector<Block*> blocks_;                      // by number of the request
  std::vector<std::pair<size_t, size_t>> events_;  // number and size of a request; size 0: its release
};

Imitation* imitation = nullptr;

void count(long long change) {
  const long long now = live.fetch_add(change, std::memory_order_relaxed) + change;
  long long seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (!data) return;  // oneDNN frees the empty scratchpad that it requested (in GELU, for example)
  char* block = static_cast<char*>(data) - kHeader;
  const Header header = *reinterpret_cast<Header*>(block);
  count(-static_cast<long long>(header.size));
  if (imitation && header.size && header.request != SIZE_MAX) imitation->release(header.request);
  inner->raw_deleter()(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return inner->allocate(0);
    char* block = static_cast<char*>(inner->allocate(size + kHeader).release_context());
    Header& header = *reinterpret_cast<Header*>(block);
    header = {counting.load(std::memory_order_relaxed) ? size : 0, SIZE_MAX};
    if (header.size) {
      count(static_cast<long long>(header.size));
      if (imitation) header.request = imitation->request(size);
    }
    // Data and context are one pointer, as raw_allocate demands (bf16 matmul packs its weights with it).
    return {block + kHeader, block + kHeader, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { inner->copy_data(to, from, size); }
};

CountingAllocator allocator;

}  // namespace

extern "C" {
void zeroscale_install() {
  if (inner) return;
  inner = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&allocator, /*priority=*/255);
}
void zeroscale_count(int on) { counting.store(on != 0); }
long long zeroscale_live() { return imitation ? imitation->device.live : live.load(); }
long long zeroscale_peak() { return imitation ? imitation->device.peak : peak.load(); }
void zeroscale_forget_peak() {
  peak.store(live.load());
  if (imitation) imitation->forget_peaks();
}
// `kept` are the bytes that libraries request at the start and keep.
void zeroscale_imitate(long long kept) {
  if (imitation) return;
  imitation = new Imitation;
  imitation->request(static_cast<size_t>(kept));
}
// Peaks of reserved bytes, since `zeroscale_forget_peak` and in all; -1 if no allocator is imitated.
long long zeroscale_reserved_peak() { return imitation ? imitation->device.reserved_peak : -1; }
long long zeroscale_most_reserved() { return imitation ? imitation->device.most_reserved : -1; }
// 1 if a GPU with `limit` bytes could have served all requests so far, else 0.
int zeroscale_suffices(long long limit) { return imitation && imitation->suffices(limit); }
}
