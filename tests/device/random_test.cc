#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "test_support.h"

namespace ebbtide::device {
namespace {

// Bytes on the device or the host, what they must hold, and the events of their last write and of the reads since.
struct Buffer {
  unsigned char* bytes = nullptr;
  bool on_device = false;
  Stream owner;
  std::vector<unsigned char> model;
  std::optional<EventId> write;
  std::vector<EventId> reads;
};

// Random work with every edge that it needs: nothing may race and all bytes come out as if run in the order of calls.
class RandomRun {
 public:
  RandomRun(const Options& options, std::uint64_t seed) : rig_(options), random_(seed) {
    streams_ = {rig_.main, rig_.side, rig_.device.new_stream(0)};
    for (int i = 0; i < 4; ++i) add(i % 2 == 0);
  }

  void step() {
    switch (below(10)) {
      case 0:
        return add(below(2) == 0);
      case 1:
        return drop();
      case 2:
        return fill_by_host();
      case 3:
      case 4:
        return fill();
      case 5:
        return synchronize();
      default:
        return copy();
    }
  }

  void finish() {
    rig_.device.synchronize(0);
    for (const Buffer& buffer : buffers_) check(buffer);
    EXPECT_EQ(rig_.races(), "");
  }

 private:
  static constexpr std::uint64_t kSize = 6 * kKiB;

  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  Stream any_stream() { return streams_[below(streams_.size())]; }
  Buffer& any() { return buffers_[below(buffers_.size())]; }

  void add(bool on_device) {
    if (buffers_.size() > 12) return;
    Buffer buffer{nullptr, on_device, any_stream(), std::vector<unsigned char>(kSize, kPoisoned), {}, {}};
    buffer.bytes = on_device ? rig_.allocate(kSize, buffer.owner) : rig_.pin(kSize);
    if (on_device) wrote(buffer, buffer.owner);
    buffers_.push_back(std::move(buffer));
  }

  void drop() {
    if (buffers_.size() < 4) return;
    const std::size_t index = below(buffers_.size());
    Buffer buffer = std::move(buffers_[index]);
    buffers_.erase(buffers_.begin() + static_cast<std::ptrdiff_t>(index));
    if (!buffer.on_device) {
      host_waits(buffer);
      check(buffer);
      return rig_.device.unpin(buffer.bytes);
    }
    if (below(2) == 0) {
      for (const Stream stream : streams_) rig_.device.used_on(buffer.bytes, stream);
    } else {
      will_write(buffer, buffer.owner);
    }
    rig_.device.free(buffer.bytes);
  }

  void fill() {
    Buffer& buffer = any();
    const Stream stream = any_stream();
    const int value = static_cast<int>(below(200));
    will_write(buffer, stream);
    rig_.fill(buffer.bytes, value, stream, kSize);
    std::memset(buffer.model.data(), value, kSize);
    wrote(buffer, stream);
  }

  void fill_by_host() {
    Buffer& buffer = any();
    const int value = static_cast<int>(below(200));
    host_waits(buffer);
    rig_.device.host_access("host", {{buffer.bytes, kSize, true}}, [&] { std::memset(buffer.bytes, value, kSize); });
    std::memset(buffer.model.data(), value, kSize);
    buffer.write.reset();
    buffer.reads.clear();
  }

  void copy() {
    Buffer& from = any();
    Buffer& to = any();
    if (&from == &to) return;
    const Stream stream = any_stream();
    const std::uint64_t nbytes = 1 + below(kSize);
    const std::uint64_t src = below(kSize - nbytes + 1);
    const std::uint64_t dst = below(kSize - nbytes + 1);
    if (from.write) rig_.device.wait(stream, *from.write);
    will_write(to, stream);
    rig_.device.copy(to.bytes + dst, from.bytes + src, nbytes, stream);
    std::memcpy(to.model.data() + dst, from.model.data() + src, nbytes);
    from.reads.push_back(recorded(stream));
    wrote(to, stream);
  }

  void synchronize() {
    if (below(2) == 0) return static_cast<void>(rig_.device.step(any_stream()));
    Buffer& buffer = any();
    host_waits(buffer);
    check(buffer);
  }

  void will_write(const Buffer& buffer, Stream stream) {
    if (buffer.write) rig_.device.wait(stream, *buffer.write);
    for (const EventId read : buffer.reads) rig_.device.wait(stream, read);
  }
  void wrote(Buffer& buffer, Stream stream) {
    buffer.write = recorded(stream);
    buffer.reads.clear();
  }
  EventId recorded(Stream stream) {
    const EventId event = rig_.device.new_event();
    rig_.device.record(event, stream);
    return event;
  }
  void host_waits(const Buffer& buffer) {
    if (buffer.write) rig_.device.synchronize(*buffer.write);
    for (const EventId read : buffer.reads) rig_.device.synchronize(read);
  }
  void check(const Buffer& buffer) {
    rig_.device.host_access("check", {{buffer.bytes, kSize, false}},
                            [&] { ASSERT_EQ(std::memcmp(buffer.bytes, buffer.model.data(), kSize), 0); });
  }

  Rig rig_;
  std::mt19937_64 random_;
  std::vector<Stream> streams_;
  std::vector<Buffer> buffers_;
};

TEST(Random, OrderedWorkComesOutRightAndRacesNowhere) {
  const std::array<Options, 5> ways{
      Options{},
      Options{.queue_depth = 3},
      Options{.capacity_bytes = 128 * kKiB, .reuse = Reuse::kDelayed},
      Options{.mode = Mode::kWorker, .delay_us = 20},
      Options{.mode = Mode::kWorker, .queue_depth = 2},
  };
  for (std::size_t way = 0; way < ways.size(); ++way) {
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      SCOPED_TRACE("way " + std::to_string(way) + ", seed " + std::to_string(seed));
      RandomRun run(ways[way], seed);
      for (int i = 0; i < 250; ++i) run.step();
      run.finish();
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace ebbtide::device
