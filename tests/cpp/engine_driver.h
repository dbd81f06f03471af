// A session for tests, with no device: copies run at once or when a test says so, and every restored byte is compared
// with what was saved. Thread safe, as long as a test shares no storage that it writes to.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ebbtide/engine.h"
#include "ebbtide/journal.h"
#include "fake_device.h"
#include "fake_space.h"

namespace ebbtide::testing {

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

// Where a tensor is saved, beside its epoch.
struct SavedIn {
  RunId run{};
  bool on_request = false;
};

struct DriverOptions {
  EngineConfig config{};
  std::uint64_t tier_capacity = 1 << 20;
  std::uint64_t backing_capacity = 0;  // of a file behind the tier; 0: there is none
  std::uint64_t device_capacity = 1 << 20;
  Tier tier = Tier::kHost;
  bool grows = false;        // the tier is empty until it is grown
  bool hold_copies = false;  // copies move their bytes and are reported in complete()
  bool record = false;       // keep a journal
  bool threads = false;      // several use it: what one was told last may be carried out before what another was told
};

class Driver {
 public:
  explicit Driver(const DriverOptions& options = {});
  virtual ~Driver() = default;

  EpochId begin_epoch();
  void end_epoch(EpochId epoch);
  void begin_group(EpochId epoch, std::size_t label);
  void end_group();
  // `storage` is let go of before the commands run: move it in where nobody else holds it.
  Saved pack(Storage storage, const ViewMeta& view, EpochId epoch, StreamRef stream = {},
             std::shared_ptr<Counter> counter = nullptr, std::size_t label = 0, SavedIn in = {});
  // The storage that the view lies in, its bytes compared with what was saved. Null when it could not be loaded.
  Storage unpack(const Saved& saved, PassId pass, StreamRef stream = {});
  void drop(const Saved& saved);
  void end_pass(PassId pass);
  RunId open_run(std::size_t label = 1);
  void request(RunId run, std::uint64_t identity);
  void offload_run(RunId run);
  void let_go_run(RunId run);
  void load_run(RunId run);
  void order_after_run(RunId run, StreamRef stream);
  void release_run(RunId run);
  void keep_run(RunId run);
  void close_run(RunId run);
  // What has not been started or reported is given up; copies that are held are not.
  void recover();
  void run(const Commands& commands);
  // Memory for a load that a verdict asked for.
  void adopt(StorageId id, CopyId load, const Storage& storage, StreamRef stream);

  // Copies held back, oldest first; all of them of every hop, or those of one.
  [[nodiscard]] std::vector<CopyId> held(std::optional<Hop> hop = std::nullopt) const;
  [[nodiscard]] Command command(CopyId copy) const;
  void complete(CopyId copy, bool ok = true);
  void complete_all();
  // As if an exception had come before they were started.
  void lose_copies();
  // Of one hop, where it is given.
  void fail_next_copies(int count, std::optional<Hop> hop = std::nullopt);
  // The n-th allocation for a load from now on (1: the next); 0: none.
  void fail_allocation(int nth) { failing_allocation_ = nth; }

  // Every count is back where it was.
  virtual void expect_at_rest();

 private:
  const std::unique_ptr<Memory> memory_;

 public:
  Memory& device;
  const std::shared_ptr<FakeSpace> space;
  const std::shared_ptr<FakeSpace> backing;
  Engine engine;
  Journal journal;
  int tier_full = 0;  // how often the engine said so
  int growths = 0;
  int growths_allowed = std::numeric_limits<int>::max();
  std::map<CopyId, Command> load_failures;
  bool check_bytes = true;  // of what is restored

 protected:
  Driver(const DriverOptions& options, std::unique_ptr<Memory> memory, std::shared_ptr<FakeSpace> space);

  struct Item {
    StorageRef ref;
    std::weak_ptr<FakeStorage> source;
    std::vector<std::pair<std::shared_ptr<Counter>, std::uint64_t>> versions;
    Storage lease;
    int leases = 0;
    std::map<CopyId, Storage> restored;
    std::weak_ptr<FakeStorage> restored_weak;
    CopyId restored_by{};  // the load of restored_weak
    std::vector<std::uint64_t> pinned;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Moves bytes between the device and the space, at the latest moment that the engine allows.
  virtual void begin_copy(const Command& command, bool ok);
  virtual void finish_copy(const Command& command, bool ok);
  virtual void record(const Command& command);
  virtual void order(const Command& command);
  virtual void record_stream(const Command& command);
  // Whether a copy that was started orders what comes after it.
  [[nodiscard]] virtual bool has_streams() const { return false; }
  void move_bytes(const Plan& plan);
  virtual std::uint8_t* at(const Place& place, std::uint64_t nbytes, bool for_writing);
  [[nodiscard]] bool fails(Hop hop);

  const DriverOptions options_;
  mutable std::mutex mutex_;
  std::map<StorageId, Item> items_;

 private:
  Saved save(Storage storage, Saved saved, SaveRequest request);
  Storage load(const Saved& saved, const RestoreVerdict& verdict, bool& out_of_memory);
  void start(const Command& command);
  void wait(CopyId copy);
  void wait_until_started(CopyId load);
  void wait_for_other(StorageId storage, const RestoreVerdict& verdict);
  Storage allocate(std::uint64_t nbytes, std::uint64_t residue, StreamRef stream);
  void allocate_ahead(const Command& command);
  void forget(StorageId storage);
  void grow(std::uint64_t nbytes);
  ProbeAnswer inspect(StorageId id);
  static bool intact(const Item& item);
  static bool spoiled(const Item& item);
  template <class Made>
  Made note(const Call& call, Made made) {
    if (options_.record) journal.push_back({call, to_string(made)});
    return made;
  }

  std::map<CopyId, Command> copies_;  // started, not reported
  std::set<CopyId> loaded_;
  std::set<CopyId> failed_;
  std::set<EventId> recorded_;
  std::optional<Hop> failing_hop_;
  std::atomic<int> failing_ = 0;
  std::atomic<int> failing_allocation_ = 0;
};

}  // namespace ebbtide::testing
