// Device storages for tests, and the memory they come from.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ebbtide/storage_ref.h"
#include "ebbtide/types.h"
#include "ebbtide/view_meta.h"

namespace ebbtide::testing {

// An in-place counter, shared by the tensors that see each other's writes.
using Counter = std::atomic<std::uint64_t>;

class Memory;

// A framework storage. Dies with its last reference, as the framework's does.
struct FakeStorage {
  FakeStorage(Memory& owner, const StorageRef& storage_ref) : memory(owner), ref(storage_ref) {}
  FakeStorage(const FakeStorage&) = delete;
  FakeStorage& operator=(const FakeStorage&) = delete;
  ~FakeStorage();

  Memory& memory;
  StorageRef ref;
  std::shared_ptr<Counter> counter = std::make_shared<Counter>(0);
  std::vector<std::uint8_t> bytes;  // of synchronous memory
};
using Storage = std::shared_ptr<FakeStorage>;

// Thread safe, as long as a test shares no storage that it writes to.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  // At an address with this residue modulo kAlignmentBytes; null when it is out of memory.
  [[nodiscard]] virtual Storage allocate(std::uint64_t nbytes, std::uint64_t residue = 0, StreamRef stream = {}) = 0;
  [[nodiscard]] virtual std::vector<std::uint8_t> read(const FakeStorage& storage, ByteRange range,
                                                       StreamRef stream) = 0;
  virtual void write(FakeStorage& storage, const std::vector<std::uint8_t>& bytes, StreamRef stream) = 0;
  [[nodiscard]] virtual std::uint64_t used_bytes() const = 0;

  // While a storage lives or somebody has pinned its identity, no other storage gets it.
  void pin(std::uint64_t identity);
  void unpin(std::uint64_t identity);

 protected:
  [[nodiscard]] std::uint64_t new_identity();

 private:
  friend struct FakeStorage;
  virtual void free(FakeStorage& storage) = 0;

  std::mutex pins_mutex_;
  std::map<std::uint64_t, int> pins_;  // by identity
};

// Synchronous memory: byte vectors. Addresses are used again at once.
class FakeDevice final : public Memory {
 public:
  explicit FakeDevice(std::uint64_t capacity) : capacity_(capacity) {}

  [[nodiscard]] Storage allocate(std::uint64_t nbytes, std::uint64_t residue, StreamRef stream) override;
  [[nodiscard]] std::vector<std::uint8_t> read(const FakeStorage& storage, ByteRange range, StreamRef stream) override;
  void write(FakeStorage& storage, const std::vector<std::uint8_t>& bytes, StreamRef stream) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;
  // The bytes of a place, for a copy; fails the test where it is in no storage.
  [[nodiscard]] std::uint8_t* at(const Place& place, std::uint64_t nbytes);

 private:
  void free(FakeStorage& storage) override;

  const std::uint64_t capacity_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, FakeStorage*> live_;  // by address
  std::uint64_t used_ = 0;
};

// A view of bytes [begin, end).
ViewMeta bytes_view(std::uint64_t begin, std::uint64_t end);
// New bytes through `counter`, the storage's own where none is given.
void write(const Storage& storage, std::uint8_t seed, const std::shared_ptr<Counter>& counter = nullptr,
           StreamRef stream = {});

}  // namespace ebbtide::testing
