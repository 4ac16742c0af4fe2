// Counts what torch allocates on the CPU, in whichever thread: bytes now, and the most since `reset`.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, long long> sizes;
long long held = 0, most = 0;

void release(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = sizes.find(data); found != sizes.end()) {
      held -= found->second;
      sizes.erase(found);
    }
  }
  c10::free_cpu(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> lock(mutex);
      sizes[data] = static_cast<long long>(bytes);
      held += static_cast<long long>(bytes);
      most = std::max(most, held);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

Counting counting;

}  // namespace

extern "C" {
void allocations_install() {
  c10::SetCPUAllocator(&counting, 100);
}
long long allocations_held() {
  std::lock_guard<std::mutex> lock(mutex);
  return held;
}
long long allocations_most() {
  std::lock_guard<std::mutex> lock(mutex);
  return most;
}
void allocations_reset() {
  std::lock_guard<std::mutex> lock(mutex);
  most = held;
}
}
