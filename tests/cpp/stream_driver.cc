#include "stream_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace ebbtide::testing {

namespace {

device::Stream lane(StreamRef stream) {
  EXPECT_NE(stream, StreamRef{}) << "work without a stream";
  return {0, value(stream) - 1};
}

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

DriverOptions holding(DriverOptions options) {
  options.hold_copies = true;
  return options;
}

}  // namespace

StreamMemory::StreamMemory(std::uint64_t capacity)
    : device({.capacity_bytes = std::uint64_t{1} << 24}), capacity_(capacity) {
  EXPECT_EQ(device.new_stream(0), lane(kSide));
}

Storage StreamMemory::allocate(std::uint64_t nbytes, std::uint64_t residue, StreamRef stream) {
  const std::lock_guard lock(mutex_);
  if (used_ + nbytes > capacity_) return nullptr;
  void* const block = device.allocate(std::max<std::uint64_t>(nbytes, 1) + residue, lane(stream));
  const std::uint64_t address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(block)) + residue;
  auto storage = std::make_shared<FakeStorage>(*this, StorageRef{DeviceId{0}, new_identity(), address, nbytes});
  blocks_[storage->ref.identity] = block;
  used_ += nbytes;
  return storage;
}

void StreamMemory::free(FakeStorage& storage) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(storage.ref.identity);
  device.free(block->second);
  blocks_.erase(block);
  used_ -= storage.ref.nbytes;
}

std::vector<std::uint8_t> StreamMemory::read(const FakeStorage& storage, ByteRange range, StreamRef stream) {
  std::vector<std::uint8_t> bytes(range.nbytes());
  const void* const begin = pointer(storage.ref.address + range.begin);
  if (range.empty()) return bytes;
  device.kernel("read", lane(stream), {{begin, range.nbytes(), false}},
                [&] { std::memcpy(bytes.data(), begin, bytes.size()); });
  return bytes;
}

void StreamMemory::write(FakeStorage& storage, const std::vector<std::uint8_t>& bytes, StreamRef stream) {
  void* const begin = pointer(storage.ref.address);
  device.kernel("write", lane(stream), {{begin, bytes.size(), true}},
                [&] { std::memcpy(begin, bytes.data(), bytes.size()); });
}

std::uint64_t StreamMemory::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::shared_ptr<FakeSpace> StreamMemory::make_space(std::uint64_t capacity) {
  const auto poison = [this](std::uint8_t* memory, std::uint64_t nbytes) {
    device.host_access("host block changes hands", {{memory, nbytes, true}},
                       [&] { std::memset(memory, kPoison, nbytes); });
  };
  return std::make_shared<FakeSpace>(static_cast<std::uint8_t*>(device.pin(capacity)), capacity, poison);
}

void StreamMemory::used_on(const FakeStorage& storage, device::Stream stream) {
  const std::lock_guard lock(mutex_);
  device.used_on(blocks_.at(storage.ref.identity), stream);
}

StreamDriver::StreamDriver(DriverOptions options)
    : StreamDriver(holding(std::move(options)), new StreamMemory(options.device_capacity)) {}

StreamDriver::StreamDriver(const DriverOptions& options, StreamMemory* memory)
    : Driver(options, std::unique_ptr<Memory>(memory), memory->make_space(options.tier_capacity)),
      memory_(*memory),
      out_(memory_.device.new_stream(0)),
      in_(memory_.device.new_stream(0)) {}

Storage StreamDriver::filled(std::uint64_t nbytes, std::uint8_t seed, StreamRef stream, std::uint64_t residue) {
  Storage storage = device.allocate(nbytes, residue, stream);
  if (storage != nullptr) write(storage, seed, nullptr, stream);
  return storage;
}

void StreamDriver::user_order(StreamRef before, StreamRef after) {
  const device::EventId event = memory_.device.new_event();
  memory_.device.record(event, lane(before));
  memory_.device.wait(lane(after), event);
  memory_.device.destroy_event(event);
}

void StreamDriver::user_record_stream(const FakeStorage& storage, StreamRef stream) {
  memory_.used_on(storage, lane(stream));
}

bool StreamDriver::has_run(CopyId copy) {
  const Lock lock(mutex_);
  return memory_.device.query(done_.at(copy));
}

std::vector<std::string> StreamDriver::races() const {
  std::vector<std::string> found;
  for (const device::Race& race : memory_.device.races()) {
    const bool unused = race.first.starts_with("copy D2") && race.first.ends_with(":" + std::to_string(out_.number)) &&
                        race.second.starts_with("kernel write");
    if (!unused) found.push_back(to_string(race));
  }
  return found;
}

void StreamDriver::expect_at_rest() {
  Driver::expect_at_rest();
  for (const std::string& race : races()) ADD_FAILURE() << race;
}

void StreamDriver::begin_copy(const Command& command, bool ok) {
  if (command.hop != Hop::kOffload && command.hop != Hop::kLoad) return;
  const device::Stream stream = command.hop == Hop::kOffload ? out_ : in_;
  if (!left_out.contains(Edge::kEvents)) {
    for (const EventId event : command.after) memory_.device.wait(stream, events_.at(event));
  }
  if (!left_out.contains(Edge::kAfterCopies)) {
    for (const CopyId copy : command.after_copies) wait_for(stream, copy);
  }
  // What failed may have written anything.
  if (ok) issue(command.plan, stream);
  const device::EventId done = memory_.device.new_event();
  memory_.device.record(done, stream);
  done_[command.copy] = done;
}

void StreamDriver::issue(const Plan& plan, device::Stream stream) {
  const std::uint64_t nbytes = staging_bytes(plan);
  void* const staging = nbytes > 0 ? memory_.device.allocate(nbytes, stream) : nullptr;
  const auto bytes_at = [&](const Place& place, std::uint64_t count, bool for_writing) -> std::uint8_t* {
    if (place.tier == Tier::kHost) return space->at(place, count, for_writing);
    if (place.tier == Tier::kStaging) return static_cast<std::uint8_t*>(staging) + place.byte_offset;
    return static_cast<std::uint8_t*>(pointer(place.position()));
  };
  for (const CopySpan& span : plan) {
    std::uint8_t* const dst = bytes_at(span.dst, span.nbytes, true);
    const std::uint8_t* const src = bytes_at(span.src, span.nbytes, false);
    if (dst != nullptr && src != nullptr) memory_.device.copy(dst, src, span.nbytes, stream);
  }
  if (staging != nullptr) memory_.device.free(staging);
}

void StreamDriver::finish_copy(const Command& command, bool ok) {
  if (command.hop == Hop::kSpill || command.hop == Hop::kFetch) {
    if (ok) move_on(command.plan);
    return;
  }
  memory_.device.synchronize(done_.at(command.copy));
}

void StreamDriver::move_on(const Plan& plan) {
  for (const CopySpan& span : plan) {
    const bool spill = span.src.tier == Tier::kHost;
    std::uint8_t* const host = space->at(spill ? span.src : span.dst, span.nbytes, !spill);
    std::uint8_t* const file = backing->at(spill ? span.dst : span.src, span.nbytes, spill);
    if (host == nullptr || file == nullptr) return;
    memory_.device.host_access(spill ? "spill" : "fetch", {{host, span.nbytes, !spill}},
                               [&] { std::memcpy(spill ? file : host, spill ? host : file, span.nbytes); });
  }
}

void StreamDriver::record(const Command& command) {
  const device::EventId event = memory_.device.new_event();
  memory_.device.record(event, lane(command.stream));
  events_[command.event] = event;
}

void StreamDriver::order(const Command& command) {
  if (left_out.contains(Edge::kWait)) return;
  const Lock lock(mutex_);
  wait_for(lane(command.stream), command.copy);
}

void StreamDriver::wait_for(device::Stream stream, CopyId copy) {
  const auto found = done_.find(copy);
  if (found == done_.end()) {
    ADD_FAILURE() << "copy " << value(copy) << " was not started";
    return;
  }
  memory_.device.wait(stream, found->second);
}

void StreamDriver::record_stream(const Command& command) {
  if (left_out.contains(Edge::kRecordStream)) return;
  const Lock lock(mutex_);
  const auto found = items_.find(command.storage);
  if (found == items_.end()) {
    ADD_FAILURE() << "an unknown storage: " << to_string(command);
    return;
  }
  Item& item = found->second;
  const bool of_load = value(command.stream) != 0 && value(command.copy) != 0;
  Storage storage;
  if (of_load) {
    const auto restored = item.restored.find(command.copy);
    storage = restored != item.restored.end() ? restored->second : item.restored_weak.lock();
  } else {
    storage = item.lease != nullptr ? item.lease : item.source.lock();
  }
  if (value(command.stream) == 0 && !done_.contains(command.copy)) {
    ADD_FAILURE() << "copy " << value(command.copy) << " was not started";
  }
  if (storage != nullptr) memory_.used_on(*storage, value(command.stream) == 0 ? out_ : lane(command.stream));
}

}  // namespace ebbtide::testing
