#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "device.h"

namespace ebbtide::device {

constexpr std::uint64_t kKiB = std::uint64_t{1} << 10;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kBytes = 8 * kKiB;  // of most blocks here
constexpr unsigned char kPoisoned = 0xFF;

// The kernel reads the byte, so that no signal is raised where it cannot be.
inline bool readable(const void* address) {
  int ends[2];
  if (::pipe(ends) != 0) return false;
  const bool read = ::write(ends[1], address, 1) == 1;
  ::close(ends[0]);
  ::close(ends[1]);
  return read;
}

// A device with two streams, and short words for what tests do with it.
class Rig {
 public:
  explicit Rig(const Options& options = {}) : device(options), side(device.new_stream(0)) {}

  unsigned char* allocate(std::uint64_t nbytes = kBytes) { return allocate(nbytes, main); }
  unsigned char* allocate(std::uint64_t nbytes, Stream stream) {
    return static_cast<unsigned char*>(device.allocate(nbytes, stream));
  }
  unsigned char* pin(std::uint64_t nbytes = kBytes) { return static_cast<unsigned char*>(device.pin(nbytes)); }

  void fill(void* block, int value, Stream stream, std::uint64_t nbytes = kBytes) {
    device.kernel("fill", stream, {{block, nbytes, true}}, [&] { std::memset(block, value, nbytes); });
  }
  void use(const void* block, Stream stream, std::uint64_t nbytes = kBytes) {
    device.kernel("use", stream, {{block, nbytes, false}}, [] {});
  }
  // What `after` is given from now on comes after what `before` has been given.
  void order(Stream before, Stream after) {
    const EventId event = device.new_event();
    device.record(event, before);
    device.wait(after, event);
    device.destroy_event(event);
  }
  // Looks past streams and checks.
  [[nodiscard]] bool holds(const void* block, int value, std::uint64_t nbytes = kBytes) {
    const Device::Open open(device, {{block, nbytes, false}});
    const auto* const bytes = static_cast<const unsigned char*>(block);
    return std::all_of(bytes, bytes + nbytes, [&](unsigned char byte) { return byte == value; });
  }
  [[nodiscard]] std::string races() const {
    std::string text;
    for (const Race& race : device.races()) text += race.first + " | " + race.second + "\n";
    return text;
  }

  Device device;
  const Stream main{0, 0};
  const Stream side;
};

}  // namespace ebbtide::device
