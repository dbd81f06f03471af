#include "fake_device.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ebbtide/config.h"
#include "fake_space.h"

namespace ebbtide::testing {

namespace {

constexpr std::uint64_t kDeviceBase = 0x1000;

}  // namespace

FakeStorage::~FakeStorage() {
  memory.free(*this);
  memory.unpin(ref.identity);
}

std::uint64_t Memory::new_identity() {
  const std::lock_guard lock(pins_mutex_);
  std::uint64_t identity = 1;
  while (pins_.contains(identity)) ++identity;
  pins_[identity] = 1;
  return identity;
}

void Memory::pin(std::uint64_t identity) {
  const std::lock_guard lock(pins_mutex_);
  ++pins_[identity];
}

void Memory::unpin(std::uint64_t identity) {
  const std::lock_guard lock(pins_mutex_);
  if (--pins_[identity] == 0) pins_.erase(identity);
}

Storage FakeDevice::allocate(std::uint64_t nbytes, std::uint64_t residue, StreamRef) {
  const std::lock_guard lock(mutex_);
  if (used_ + nbytes > capacity_) return nullptr;
  std::uint64_t address = kDeviceBase + residue;
  for (const auto& [live_address, live] : live_) {
    if (address + std::max<std::uint64_t>(nbytes, 1) <= live_address) break;
    while (address < live_address + std::max<std::uint64_t>(live->ref.nbytes, 1)) address += kAlignmentBytes;
  }
  auto storage = std::make_shared<FakeStorage>(*this, StorageRef{DeviceId{0}, new_identity(), address, nbytes});
  storage->bytes.assign(nbytes, kPoison);
  live_[address] = storage.get();
  used_ += nbytes;
  return storage;
}

void FakeDevice::free(FakeStorage& storage) {
  const std::lock_guard lock(mutex_);
  live_.erase(storage.ref.address);
  used_ -= storage.ref.nbytes;
}

std::vector<std::uint8_t> FakeDevice::read(const FakeStorage& storage, ByteRange range, StreamRef) {
  return {storage.bytes.data() + range.begin, storage.bytes.data() + range.end};
}

void FakeDevice::write(FakeStorage& storage, const std::vector<std::uint8_t>& bytes, StreamRef) {
  storage.bytes = bytes;
}

std::uint8_t* FakeDevice::at(const Place& place, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto live = live_.find(place.base);
  if (live == live_.end() || place.byte_offset + nbytes > live->second->ref.nbytes) {
    ADD_FAILURE() << "a copy touches a storage that is gone or smaller: " << to_string(place);
    return nullptr;
  }
  return live->second->bytes.data() + place.byte_offset;
}

std::uint64_t FakeDevice::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

ViewMeta bytes_view(std::uint64_t begin, std::uint64_t end) {
  return {static_cast<std::int64_t>(begin), 1, 0, {static_cast<std::int64_t>(end - begin)}, {1}};
}

void write(const Storage& storage, std::uint8_t seed, const std::shared_ptr<Counter>& counter, StreamRef stream) {
  std::vector<std::uint8_t> bytes(storage->ref.nbytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(seed + 7 * i);
  storage->memory.write(*storage, bytes, stream);
  ++*(counter != nullptr ? counter : storage->counter);
}

}  // namespace ebbtide::testing
