// What the files of PyTorch's shell around the test device share: the device itself, what is current on this thread,
// and the two allocators. The device is PrivateUse1, named "tide" from Python.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>

#include "device.h"

namespace ebbtide::device {

inline constexpr c10::DeviceType kTide = c10::DeviceType::PrivateUse1;

inline constexpr c10::DeviceIndex kDevices = 2;

// Made at first use and never destroyed: tensors may outlive every static object.
Device& the_device();

// --- of this thread
c10::DeviceIndex current_index();
// Returns the one before. Throws when there is no such device.
c10::DeviceIndex set_current_index(c10::DeviceIndex index);
Stream current_stream(c10::DeviceIndex index);
Stream set_current_stream(Stream stream);

inline Stream from_torch(const c10::Stream& stream) {
  return {stream.device_index(), static_cast<std::uint64_t>(stream.id())};
}
inline c10::Stream to_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kTide, static_cast<c10::DeviceIndex>(stream.device)),
                     static_cast<c10::StreamId>(stream.number));
}

// Allocates on the current stream of the current device.
c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

// What `is_current_stream_capturing` answers; tests switch it.
std::atomic<bool>& capturing();

}  // namespace ebbtide::device
