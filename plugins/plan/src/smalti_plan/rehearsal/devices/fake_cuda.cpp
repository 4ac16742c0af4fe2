// CUDA devices that are not there: what torch asks of a device beside kernels and memory, answered for any number of them. Streams
// and events do nothing but leave a trace; host memory that is asked to be pinned is ordinary, and counted. With this library
// loaded, torch runs fake tensors on "cuda", autograd and threads included; a build with CUDA too. A real kernel still fails.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace {

using namespace c10;

constexpr int kMostDevices = 64;

// --- the trace: read by order.py, which knows the kinds by these numbers ---------------------------------------------

enum Kind : int64_t { kSetDevice, kRecord, kBlock, kSyncStream, kSyncEvent, kSyncDevice, kPin, kNote };

struct Entry {
  int64_t kind, thread, device, stream, value;
};

std::mutex trace_lock;
std::vector<Entry> trace;
std::atomic<int64_t> next_thread{0}, next_stream{1}, next_event{1};
DeviceIndex devices = 1;

thread_local const int64_t this_thread = next_thread++;
thread_local DeviceIndex current = 0;
thread_local StreamId streams[kMostDevices] = {0};

void leave(Kind kind, int64_t device, int64_t stream, int64_t value) {
  std::lock_guard<std::mutex> guard(trace_lock);
  trace.push_back({kind, this_thread, device, stream, value});
}

// --- devices, streams, events ----------------------------------------------------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return Device(type(), current); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    if (device.index() != current) setDevice(device);
    return before;
  }
  // From CUDA 12 on, this opens a context on the device. What a destructor does to go back (`uncheckedSetDevice`) does not.
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices, "CUDA error: invalid device ordinal");
    if (device.index() < 0) return;
    current = device.index();
    leave(kSetDevice, current, 0, 0);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }

  Stream getStream(Device device) const override { return stream(device, streams[indexOf(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(device, next_stream++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& one) const override { leave(kSyncStream, one.device_index(), one.id(), 0); }
  void synchronizeDevice(const DeviceIndex device) const override { leave(kSyncDevice, device, 0, 0); }

  void record(void** event, const Stream& one, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(next_event++);
    leave(kRecord, one.device_index(), one.id(), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const Stream& one) const override {
    leave(kBlock, one.device_index(), one.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { leave(kSyncEvent, current, 0, reinterpret_cast<int64_t>(event)); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }

 private:
  DeviceIndex indexOf(Device device) const { return device.has_index() ? device.index() : current; }
  Stream stream(Device device, StreamId id) const { return Stream(Stream::UNSAFE, Device(type(), indexOf(device)), id); }
};

// --- pinned memory: ordinary memory of exactly the size that was asked for -------------------------------------------

std::map<const char*, size_t> pinned;  // under trace_lock

void unpin(void* data) {
  std::lock_guard<std::mutex> guard(trace_lock);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    if (size == 0) return DataPtr(nullptr, Device(DeviceType::CPU));
    void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    TORCH_CHECK(data != nullptr, "out of memory");
    leave(kPin, current, 0, static_cast<int64_t>(size));
    std::lock_guard<std::mutex> guard(trace_lock);
    pinned[static_cast<const char*>(data)] = size;
    return DataPtr(data, data, &unpin, Device(DeviceType::CPU));
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(trace_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(data) < found->first + found->second;
}

// Which kernel computes attention: none. A build with CUDA would ask the driver what the device can do.
template <typename... Given>
int64_t plain_attention(Given...) {
  return 0;
}

Guard guard;
PinnedAllocator pinned_allocator;

}  // namespace

// --- what torch calls through its registry ----------------------------------------------------------------------------

namespace at {

struct FakeCudaHooks final : CUDAHooksInterface {
  explicit FakeCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { guard.setDevice(Device(DeviceType::CUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return guard.exchangeDevice(Device(DeviceType::CUDA, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { guard.synchronizeDevice(device); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

// libtorch_cuda registers hooks of this name as well.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", REGISTRY_PREFERRED, FakeCudaHooks)

}  // namespace at

// --- what fake_cuda.py calls ------------------------------------------------------------------------------------------

extern "C" {

// Before torch has looked for CUDA. Whether it took these devices for some.
int fake_cuda_install(int count) {
  devices = static_cast<DeviceIndex>(count);
  impl::ensureCUDADeviceGuardSet();
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);
  return at::detail::getCUDAHooks().hasCUDA();
}

// Marks a place in the trace, with the stream that is current on a device; -1 for the current device.
void fake_cuda_note(int device, int64_t value) {
  int64_t index = device < 0 ? current : device;
  leave(kNote, index, streams[index], value);
}

int64_t fake_cuda_trace_length() {
  std::lock_guard<std::mutex> guard(trace_lock);
  return static_cast<int64_t>(trace.size());
}

// Copies `count` entries of five numbers each from the beginning.
void fake_cuda_trace(int64_t* into, int64_t count) {
  std::lock_guard<std::mutex> guard(trace_lock);
  static_assert(sizeof(Entry) == 5 * sizeof(int64_t));
  std::copy_n(reinterpret_cast<const int64_t*>(trace.data()), 5 * count, into);
}

// cudaHostRegister and cudaHostUnregister, which answer with an error's number.
int fake_cuda_register(void* data, int64_t size) {
  leave(kPin, current, 0, size);
  std::lock_guard<std::mutex> guard(trace_lock);
  pinned[static_cast<const char*>(data)] = static_cast<size_t>(size);
  return 0;
}

int fake_cuda_unregister(void* data) {
  std::lock_guard<std::mutex> guard(trace_lock);
  return pinned.erase(static_cast<const char*>(data)) ? 0 : 713;
}

int64_t fake_cuda_this_thread() { return this_thread; }
}
