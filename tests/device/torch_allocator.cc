// Device memory and page-locked memory as PyTorch's allocators.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torch_shell.h"

namespace ebbtide::device {
namespace {

void release_nothing(void*) {}

void release_block(void* block) { the_device().free(block); }

class TideAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::DeviceIndex index = current_index();
    const c10::Device where(kTide, index);
    if (nbytes == 0) return {nullptr, nullptr, &release_nothing, where};
    try {
      void* block = the_device().allocate(nbytes, current_stream(index));
      return {block, block, &release_block, where};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }

  void copy_data(void* dst, const void* src, std::size_t nbytes) const override {
    the_device().copy(dst, src, nbytes, current_stream(current_index()));
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { the_device().reset_peak(index); }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() != nullptr) the_device().used_on(data.get(), from_torch(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const MemoryStats memory = the_device().memory(index);
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
      (*bytes)[kAll].current = static_cast<std::int64_t>(memory.used_bytes);
      (*bytes)[kAll].peak = static_cast<std::int64_t>(memory.peak_bytes);
    }
    stats.allocation[kAll].allocated = static_cast<std::int64_t>(memory.allocations);
    return stats;
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const std::size_t total = the_device().options().capacity_bytes;
    return {total - std::min<std::size_t>(total, the_device().memory(index).used_bytes), total};
  }
};

void release_pinned(void* block) { the_device().unpin(block); }

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device where(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &release_nothing, where};
    void* block = the_device().pin(nbytes);
    TORCH_CHECK(block != nullptr, "[tide.pin] ", nbytes, " bytes could not be page-locked");
    return {block, block, &release_pinned, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }

  void copy_data(void* dst, const void* src, std::size_t nbytes) const override { default_copy_data(dst, src, nbytes); }
};

TideAllocator& tide_allocator() {
  static auto* allocator = new TideAllocator;
  return *allocator;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &tide_allocator());

}  // namespace

Device& the_device() {
  static auto* device = [] {
    Options options;
    options.devices = kDevices;
    return new Device(options);
  }();
  return *device;
}

c10::Allocator& device_allocator() { return tide_allocator(); }
c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

}  // namespace ebbtide::device
