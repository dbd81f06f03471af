// Current devices and streams, and streams and events as PyTorch's guard interface knows them.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "torch_shell.h"

namespace ebbtide::device {
namespace {

thread_local c10::DeviceIndex this_threads_index = 0;
thread_local std::vector<std::uint64_t> this_threads_streams;

std::uint64_t& stream_number(c10::DeviceIndex index) {
  auto& numbers = this_threads_streams;
  if (numbers.size() <= static_cast<std::size_t>(index)) numbers.resize(static_cast<std::size_t>(index) + 1, 0);
  return numbers[static_cast<std::size_t>(index)];
}

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_index(); }

struct Event {
  EventId id{};
  double recorded_s = 0;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kTide; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device getDevice() const override { return {kTide, current_index()}; }
  void setDevice(c10::Device device) const override { set_current_index(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_threads_index = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override { return {kTide, set_current_index(index_of(device))}; }

  c10::Stream getStream(c10::Device device) const override { return to_torch(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return to_torch(Stream{index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return to_torch(the_device().new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_torch(set_current_stream(from_torch(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream.id()));
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing(); }
  bool queryStream(const c10::Stream& stream) const override { return the_device().query(from_torch(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { the_device().synchronize(from_torch(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    the_device().synchronize(static_cast<DeviceIndex>(index));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event{the_device().new_event()};
    auto* mine = static_cast<Event*>(*event);
    the_device().record(mine->id, from_torch(stream));
    mine->recorded_s = the_device().clock_s(from_torch(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) the_device().wait(from_torch(stream), static_cast<Event*>(event)->id);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || the_device().query(static_cast<Event*>(event)->id);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) the_device().synchronize(static_cast<Event*>(event)->id);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(second)->recorded_s - static_cast<Event*>(first)->recorded_s);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    the_device().destroy_event(static_cast<Event*>(event)->id);
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) the_device().used_on(data.get(), from_torch(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

std::atomic<bool>& capturing() {
  static std::atomic<bool> answer{false};
  return answer;
}

c10::DeviceIndex current_index() { return this_threads_index; }

c10::DeviceIndex set_current_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "tide:", static_cast<int>(index), " asked, there are ",
              static_cast<int>(kDevices), " devices");
  return std::exchange(this_threads_index, index);
}

Stream current_stream(c10::DeviceIndex index) { return {index, stream_number(index)}; }

Stream set_current_stream(Stream stream) {
  auto& number = stream_number(static_cast<c10::DeviceIndex>(stream.device));
  return {stream.device, std::exchange(number, stream.number)};
}

}  // namespace ebbtide::device
