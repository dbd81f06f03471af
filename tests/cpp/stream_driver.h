// A session over a device whose work is asynchronous: what the engine does not order is seen as wrong bytes or as a
// race. Copies run as late as the order of their streams allows, and are reported in complete().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device.h"
#include "engine_driver.h"

namespace ebbtide::testing {

// The streams that tests compute on.
inline constexpr StreamRef kMain{1};
inline constexpr StreamRef kSide{2};

class StreamMemory final : public Memory {
 public:
  explicit StreamMemory(std::uint64_t capacity);

  [[nodiscard]] Storage allocate(std::uint64_t nbytes, std::uint64_t residue, StreamRef stream) override;
  [[nodiscard]] std::vector<std::uint8_t> read(const FakeStorage& storage, ByteRange range, StreamRef stream) override;
  void write(FakeStorage& storage, const std::vector<std::uint8_t>& bytes, StreamRef stream) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;

  // Blocks in page-locked memory.
  [[nodiscard]] std::shared_ptr<FakeSpace> make_space(std::uint64_t capacity);
  // What is queued on `stream` when the storage dies may still touch it.
  void used_on(const FakeStorage& storage, device::Stream stream);

  device::Device device;

 private:
  void free(FakeStorage& storage) override;

  const std::uint64_t capacity_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, void*> blocks_;  // by identity
  std::uint64_t used_ = 0;
};

// What orders the work of streams. Tests leave one out to see that it is missed.
enum class Edge { kEvents, kAfterCopies, kWait, kRecordStream };

class StreamDriver final : public Driver {
 public:
  explicit StreamDriver(DriverOptions options = {});

  // On kMain, where no stream is given.
  Storage filled(std::uint64_t nbytes, std::uint8_t seed = 1, StreamRef stream = kMain, std::uint64_t residue = 0);
  // What is issued on `after` from now on comes after what was issued on `before`.
  void user_order(StreamRef before, StreamRef after);
  // The storage's memory is not reused before what is queued on `stream` when it dies.
  void user_record_stream(const FakeStorage& storage, StreamRef stream);
  // Whether the copy has run. Runs nothing.
  [[nodiscard]] bool has_run(CopyId copy);

  // Bytes that were touched twice with nothing to order it. A user who is given a storage under a copy that reads it
  // may write to it: then the copy is not used.
  [[nodiscard]] std::vector<std::string> races() const;
  void expect_at_rest() override;

  std::set<Edge> left_out;

 private:
  StreamDriver(const DriverOptions& options, StreamMemory* memory);

  void begin_copy(const Command& command, bool ok) override;
  void finish_copy(const Command& command, bool ok) override;
  void record(const Command& command) override;
  void order(const Command& command) override;
  void record_stream(const Command& command) override;
  [[nodiscard]] bool has_streams() const override { return true; }
  void issue(const Plan& plan, device::Stream stream);
  void wait_for(device::Stream stream, CopyId copy);
  void move_on(const Plan& plan);

  StreamMemory& memory_;
  const device::Stream out_;
  const device::Stream in_;
  std::map<EventId, device::EventId> events_;
  std::map<CopyId, device::EventId> done_;
};

}  // namespace ebbtide::testing
