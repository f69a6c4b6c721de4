// A CPU allocator for torch that counts: live bytes and their peak, over all threads, as CUDA's allocator does.
//
// It wraps torch's own allocator and keeps each block's size in a header in front of it. The profiler's memory events
// would be an alternative, but they miss memory that other threads free (gloo's do), and profiling slows steps down.
#include <atomic>
#include <cstddef>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t kHeader = 64;  // torch aligns blocks to 64 bytes; the header keeps them so

std::atomic<long long> live{0};
std::atomic<long long> peak{0};
std::atomic<bool> counting{true};
c10::Allocator* inner = nullptr;

void count(long long change) {
  const long long now = live.fetch_add(change, std::memory_order_relaxed) + change;
  long long seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (!data) return;  // oneDNN frees the empty scratchpad that it requested (in GELU, for example)
  char* block = static_cast<char*>(data) - kHeader;
  count(-static_cast<long long>(*reinterpret_cast<size_t*>(block)));
  inner->raw_deleter()(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return inner->allocate(0);
    char* block = static_cast<char*>(inner->allocate(size + kHeader).release_context());
    const size_t counted = counting.load(std::memory_order_relaxed) ? size : 0;
    *reinterpret_cast<size_t*>(block) = counted;
    if (counted) count(static_cast<long long>(counted));
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
long long zeroscale_live() { return live.load(); }
long long zeroscale_peak() { return peak.load(); }
void zeroscale_forget_peak() { peak.store(live.load()); }
}
