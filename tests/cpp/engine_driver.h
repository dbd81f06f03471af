// A session for tests, with no device: storages are byte vectors, copies run at once or when a test says so, and every
// restored byte is compared with what was saved. Freed memory is poisoned, addresses and identities are used again at
// once. Thread safe, as long as a test shares no storage that it writes to.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ebbtide/block_space.h"
#include "ebbtide/engine.h"
#include "ebbtide/journal.h"

namespace ebbtide::testing {

// First fit in one slab of `capacity` bytes. Blocks are poisoned when handed out and when freed.
class FakeSpace final : public BlockSpace {
 public:
  explicit FakeSpace(std::uint64_t capacity, Tier tier = Tier::kHost) : tier_(tier), memory_(capacity) {}

  [[nodiscard]] Tier tier() const override { return tier_; }
  [[nodiscard]] std::optional<Block> allocate(std::uint64_t nbytes, std::uint64_t limit) override;
  void free(const Block& block) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;
  [[nodiscard]] std::uint64_t reserved_bytes() const override { return used_bytes(); }

  // The bytes of a place that lies in one block; fails the test otherwise.
  std::uint8_t* at(const Place& place, std::uint64_t nbytes);

 private:
  const Tier tier_;
  mutable std::mutex mutex_;
  std::vector<std::uint8_t> memory_;
  std::map<std::uint64_t, std::uint64_t> blocks_;  // byte offset → nbytes
};

// An in-place counter, shared by the tensors that see each other's writes.
using Counter = std::atomic<std::uint64_t>;

class FakeDevice;

// A framework storage. Dies with its last reference, as the framework's does.
struct FakeStorage {
  FakeStorage(FakeDevice& device, std::uint64_t address, std::uint64_t nbytes, std::uint64_t identity);
  FakeStorage(const FakeStorage&) = delete;
  FakeStorage& operator=(const FakeStorage&) = delete;
  ~FakeStorage();

  FakeDevice& device;
  StorageRef ref;
  std::vector<std::uint8_t> bytes;
  std::shared_ptr<Counter> counter = std::make_shared<Counter>(0);
};
using Storage = std::shared_ptr<FakeStorage>;

class FakeDevice {
 public:
  explicit FakeDevice(std::uint64_t capacity) : capacity_(capacity) {}

  // At an address with this residue modulo kAlignmentBytes, the lowest that is free; null when it is out of memory.
  Storage allocate(std::uint64_t nbytes, std::uint64_t residue = 0);
  [[nodiscard]] std::uint8_t* at(const Place& place, std::uint64_t nbytes);
  [[nodiscard]] std::uint64_t used_bytes() const;
  // While a storage lives or somebody has pinned its identity, no other storage gets it.
  void pin(std::uint64_t identity);
  void unpin(std::uint64_t identity);

 private:
  friend struct FakeStorage;

  const std::uint64_t capacity_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, FakeStorage*> live_;  // by address
  std::map<std::uint64_t, int> pins_;           // by identity
  std::uint64_t used_ = 0;
};

// What pack returns.
struct Saved {
  SaveOutcome outcome{};
  TicketId ticket{};
  StorageId storage{};
  ViewMeta view;
  std::shared_ptr<Counter> counter;
  std::uint64_t version = 0;
  std::vector<std::uint8_t> bytes;  // of the view's extent, as they were
  Storage kept;                     // kKept only
};

struct DriverOptions {
  EngineConfig config{};
  std::uint64_t tier_capacity = 1 << 20;
  std::uint64_t device_capacity = 1 << 20;
  Tier tier = Tier::kHost;
  bool hold_copies = false;  // copies move their bytes and are reported in complete()
  bool record = false;       // keep a journal
};

class Driver {
 public:
  explicit Driver(const DriverOptions& options = {});

  EpochId begin_epoch();
  void end_epoch(EpochId epoch);
  // `storage` is let go of before the commands run: move it in where nobody else holds it.
  Saved pack(Storage storage, const ViewMeta& view, EpochId epoch, StreamRef stream = {},
             std::shared_ptr<Counter> counter = nullptr);
  // The storage that the view lies in, its bytes compared with what was saved. Null when it could not be loaded.
  Storage unpack(const Saved& saved, PassId pass);
  void drop(const Saved& saved);
  void end_pass(PassId pass);

  // Copies held back, oldest first; all of them in both directions.
  [[nodiscard]] std::vector<CopyId> held() const;
  void complete(CopyId copy, bool ok = true);
  void complete_all();
  void fail_next_copies(int count) { failing_ = count; }

  // Every count is back where it was.
  void expect_at_rest();

  FakeDevice device;
  std::shared_ptr<FakeSpace> space;
  Engine engine;
  Journal journal;
  int tier_full = 0;  // how often the engine said so

 private:
  struct Item {
    StorageRef ref;
    std::weak_ptr<FakeStorage> source;
    std::vector<std::pair<std::shared_ptr<Counter>, std::uint64_t>> versions;
    Storage lease;
    int leases = 0;
    Storage restored;
    CopyId load{};
    std::weak_ptr<FakeStorage> restored_weak;
    std::vector<std::uint64_t> pinned;
  };
  using Lock = std::unique_lock<std::mutex>;

  Saved save(Storage storage, Saved saved, SaveRequest request);
  void run(const Commands& commands);
  void start(const Command& command);
  void move_bytes(const Plan& plan);
  std::uint8_t* at(const Place& place, std::uint64_t nbytes);
  void wait(CopyId copy);
  CopyId adopt(StorageId id, const Storage& storage);  // the copy that fills it
  ProbeAnswer inspect(StorageId id);
  static bool intact(const Item& item);
  static bool spoiled(const Item& item);
  template <class Made>
  Made note(const Call& call, Made made);

  const DriverOptions options_;
  mutable std::mutex mutex_;
  std::map<StorageId, Item> items_;
  std::map<CopyId, Command> copies_;  // started, not reported
  std::set<CopyId> done_;
  std::set<EventId> recorded_;
  std::atomic<int> failing_ = 0;
};

// A view of bytes [begin, end).
ViewMeta bytes_view(std::uint64_t begin, std::uint64_t end);
// New bytes through `counter`, the storage's own where none is given.
void write(const Storage& storage, std::uint8_t seed, const std::shared_ptr<Counter>& counter = nullptr);

}  // namespace ebbtide::testing
