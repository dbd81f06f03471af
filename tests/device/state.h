// What device.cc, device_memory.cc and device_work.cc share. Everything but the arenas is guarded by the scheduler's
// mutex; where a function takes a Lock, it may let go of it to wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.h"
#include "block_pool.h"
#include "device.h"
#include "faults.h"
#include "happens_before.h"
#include "scheduler.h"
#include "virtual_clock.h"

namespace ebbtide::device {

constexpr int kPoison = 0xFF;

// The tasks queued on a stream by some time.
struct Mark {
  Lane* lane = nullptr;
  std::uint64_t seq = 0;
};

[[nodiscard]] inline bool over(const std::vector<Mark>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const Mark& mark) { return mark.lane->done >= mark.seq; });
}

struct Block {
  std::uint64_t nbytes = 0;
  Extent extent;
  Lane* lane = nullptr;  // allocated on
  std::vector<Lane*> used_on;
  std::vector<Mark> marks;  // once freed: what it waits for
};

struct DeviceMemory {
  explicit DeviceMemory(std::uint64_t capacity_bytes)
      : arena(capacity_bytes), pool(arena.begin(), arena.nbytes()), limit(arena.nbytes()) {}

  Arena arena;
  BlockPool pool;
  std::map<std::uint64_t, Block> live;  // by the first byte
  std::vector<Block> pending;
  std::uint64_t limit;
  MemoryStats stats;
};

struct Unmap {
  std::uint64_t nbytes = 0;
  void operator()(void* memory) const;
};

struct PinnedBlock {
  std::unique_ptr<void, Unmap> memory;
  std::uint64_t nbytes = 0;
  std::vector<Lane*> used_on;
  std::vector<Mark> marks;  // once unpinned: what it waits for
};

// Keeps bytes open; none where no arena holds them.
class OpenBytes {
 public:
  OpenBytes(DeviceMemory* memory, std::uint64_t begin, std::uint64_t nbytes)
      : memory_(memory), begin_(begin), nbytes_(nbytes) {
    if (memory_ != nullptr) memory_->arena.open(begin_, nbytes_);
  }
  OpenBytes(const OpenBytes&) = delete;
  OpenBytes& operator=(const OpenBytes&) = delete;
  ~OpenBytes() {
    if (memory_ != nullptr) memory_->arena.close(begin_, nbytes_);
  }

 private:
  DeviceMemory* memory_;
  std::uint64_t begin_;
  std::uint64_t nbytes_;
};

struct Device::State {
  explicit State(const Options& asked);

  // --- device.cc
  void fail_if_lost(const char* where) const;
  // Throws when the device is lost, or when this call is to fail.
  void begin_call(const char* where, Operation operation);
  // Counts the call; a sticky failure loses the device.
  std::optional<Strike> count(Operation operation);
  std::shared_ptr<Version>& version(const char* where, EventId event);
  void host_sees(const VectorClock& seen, double time_s);
  void finish_lane(Lock& lock, Lane& lane);

  // --- device_memory.cc
  DeviceMemory& memory(DeviceIndex index);
  [[nodiscard]] DeviceMemory* holder(std::uint64_t address);  // needs no lock
  [[nodiscard]] Block* block_at(std::uint64_t address);
  Extent take(Lock& lock, DeviceMemory& memory, std::uint64_t nbytes, Lane& lane);
  void reclaim(DeviceMemory& memory);
  void finish_pending(Lock& lock, DeviceMemory& memory);
  void give(DeviceMemory& memory, Block block);
  void poison(Lane& lane, const Extent& extent);

  // --- pinned_memory.cc
  [[nodiscard]] PinnedBlock* pinned_at(std::uint64_t address);
  void unmap_unpinned();

  // --- device_work.cc
  void run(const Task& task);
  // Whether accesses are checked there; throws for device bytes that are in no block.
  [[nodiscard]] bool checked(const char* where, const void* begin, std::uint64_t nbytes);
  [[nodiscard]] std::vector<Access> checked(const char* where, const std::vector<Access>& accesses);

  Options options;
  std::deque<DeviceMemory> memories;
  std::map<std::uint64_t, PinnedBlock> pinned;
  std::vector<PinnedBlock> unpinned;  // kept mapped for what is still queued
  std::uint64_t pinned_bytes = 0;
  std::uint64_t pin_allocations = 0;
  HappensBefore order;
  VirtualClock clock;
  Faults faults;
  std::unordered_map<EventId, std::shared_ptr<Version>> events;  // null until recorded
  std::uint64_t next_event = 1;
  std::vector<CopyRecord> copies;
  Scheduler scheduler;  // the last member: its threads end before the rest goes
};

std::string to_string(Stream stream);

}  // namespace ebbtide::device
