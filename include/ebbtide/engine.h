// Engine: decides what is copied, when, in which order, and what is let go.
//
// A state machine without I/O. Every call returns a verdict and commands; the session runs the commands after the call
// has returned and reports back. All methods are thread safe and short; only wait_* block. The mutex is never
// held while a command runs, and the engine calls nobody but its BlockSpace.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "ebbtide/block_space.h"
#include "ebbtide/command.h"
#include "ebbtide/config.h"
#include "ebbtide/registry.h"
#include "ebbtide/stats.h"
#include "ebbtide/storage_ref.h"
#include "ebbtide/types.h"
#include "ebbtide/view_meta.h"
#include "ebbtide/window.h"

namespace ebbtide {

struct SaveRequest {
  StorageRef storage;
  ViewMeta view;
  std::uint64_t version = 0;  // of the tensor's in-place counter
  EpochId epoch{};
  StreamRef stream{};   // current at pack; none for memory whose work is synchronous
  bool forced = false;  // a user policy wants it moved, whatever its size
  // The entry that a first call joined was written to since it was saved: do not join it. Not counted again.
  bool spoiled = false;
};

enum class SaveOutcome : std::uint8_t { kKept, kNew, kJoined, kDuplicate };

struct SaveVerdict {
  SaveOutcome outcome{};
  KeepReason reason{};  // kKept only
  TicketId ticket{};    // else
  StorageId storage{};  // else
  bool lease = false;   // hold the storage until kReleaseLease
  Commands commands = {};
};

enum class RestoreOutcome : std::uint8_t { kLive, kShared, kLoad, kPending };

struct RestoreVerdict {
  RestoreOutcome outcome{};
  StorageId storage{};
  CopyId load{};              // kShared, kPending: the copy that fills it; 0 while its storage is being allocated
  std::uint64_t nbytes = 0;   // kLoad: what to allocate
  std::uint64_t residue = 0;  // kLoad: its address modulo kAlignmentBytes
  Commands commands;          // prefetches and releases, to be run after the own copy has been started
};

struct ProbeAnswer {
  // References besides this entry's lease; 0 when the framework cannot tell. The leases of other entries on the same
  // storage may be among them: the engine takes them off.
  std::uint64_t holders = 0;
  bool same = true;      // address and nbytes are those of the save
  bool intact = true;    // no in-place counter moved since the saves
  bool spoiled = false;  // every one moved: whoever asks for a saved view is refused
};

class Engine {
 public:
  // `space` is where offloaded bytes go.
  Engine(const EngineConfig& config, std::shared_ptr<BlockSpace> space);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Gives every block back. No copy may be running.
  ~Engine();

  // --- forward
  [[nodiscard]] EpochId begin_epoch();
  // Every parked storage is looked at once more; entries of the epoch take no new views.
  [[nodiscard]] Commands end_epoch(EpochId epoch);

  // A tensor that stays on the device for a reason the session knows.
  void kept(KeepReason reason, std::uint64_t nbytes);
  // A tensor saved for backward. Throws Error(kUsage) for impossible view metadata. After kJoined and kDuplicate the
  // session checks the counters of the earlier saves; where one moved it drops the ticket and saves again as `spoiled`.
  [[nodiscard]] SaveVerdict save(const SaveRequest& request);
  // A ticket's destructor.
  [[nodiscard]] Commands drop(TicketId ticket);

  // --- reports of the session
  [[nodiscard]] Commands probed(StorageId storage, const ProbeAnswer& answer);
  // `ok`: every byte was copied. `answer` is as of now; it matters for copies from the device.
  [[nodiscard]] Commands completed(CopyId copy, bool ok, const ProbeAnswer& answer);
  // The answer to kLoad and kAlloc: `restored` takes the place of an earlier one, which the session lets go of, and is
  // held until kReleaseRestored. Throws Error(kUsage) when it is smaller than asked.
  [[nodiscard]] Commands allocated(StorageId storage, const StorageRef& restored, StreamRef stream);
  // Where somebody asked for the storage, lets go of everything that is held for tickets not asked for yet, waiting for
  // guesses that are loading: the caller may call `restore` and allocate once more. A guess is only cancelled.
  [[nodiscard]] Commands allocation_failed(StorageId storage);

  // After an exception cut the session short: what it was asked for and never reported counts as failed. `running` are
  // the copies that will still be reported. Afterwards nothing waits for an answer that does not come.
  [[nodiscard]] Commands recover(const std::vector<CopyId>& running);

  [[nodiscard]] bool knows(StorageId storage) const;

  // --- backward
  // `live`: the session holds the saved storage, unchanged. `shared`: it holds the restored one. `pass` 0 means no
  // backward is running: nothing is claimed or kept for others. Throws Error(kDevice) when the bytes are nowhere.
  [[nodiscard]] RestoreVerdict restore(TicketId ticket, PassId pass, bool live, bool shared);
  // Blocks until `storage` is not being allocated by another thread, at most for `limit`; returns whether it is so.
  // Call without the GIL.
  bool wait_allocated(StorageId storage, std::chrono::milliseconds limit = std::chrono::hours(1));
  // Blocks until `storage` is neither being allocated nor loading: somebody else has to report that. Call without the
  // GIL.
  void wait_loaded(StorageId storage);
  // The pass is over: nothing it loaded is kept for it any more.
  [[nodiscard]] Commands end_pass(PassId pass);

  [[nodiscard]] Stats stats() const;
  void reset_stats();

 private:
  struct RunningCopy {
    StorageId storage{};
    bool to_device = false;
  };

  // engine_save.cc
  Entry* find_join(const SaveRequest& request, ByteRange range);
  TicketId issue(Entry& entry, std::uint32_t view);
  void want(Entry& entry, ByteRange range, StreamRef stream, SaveVerdict& verdict);

  // engine_offload.cc
  void look(Commands& commands, std::size_t parked);
  void probe(Entry& entry, Commands& commands);
  void start_offload(Entry& entry, Commands& commands);
  void bound_in_flight(Commands& commands);
  void finish_offload(Entry& entry, bool ok, const ProbeAnswer& answer, Commands& commands);
  void leave_changed(Entry& entry, const ProbeAnswer& answer, Commands& commands);
  [[nodiscard]] bool held_by_others(const Entry& entry, const ProbeAnswer& answer) const;
  void pin(Entry& entry);
  void keep_on_device(Entry& entry, Commands& commands);

  // engine_restore.cc
  void claim(Entry& entry, TicketRecord& ticket, PassId pass);
  void begin_claims(Entry& entry, PassId pass);
  void begin_load(Entry& entry, bool guess);
  void finish_load(Entry& entry, bool ok, Commands& commands);
  void prefetch(const Entry& after, PassId pass, Commands& commands);
  void no_longer_guess(Entry& entry);
  void release_restored(Entry& entry, Commands& commands);
  void release_unclaimed(Commands& commands);

  // engine.cc
  void set_lease(Entry& entry, Lease lease);
  void release_lease(Entry& entry, Commands& commands);
  void set_found_held(Entry& entry, bool held);
  void hold_restored(Entry& entry, bool held);
  void finish_entry(Entry& entry, Commands& commands);
  [[nodiscard]] std::optional<Block> take_block(std::uint64_t nbytes);
  void give_block(const Block& block);

  const EngineConfig config_;
  const std::shared_ptr<BlockSpace> space_;

  mutable std::mutex mutex_;
  std::condition_variable load_changed_;
  Registry registry_;
  std::map<DeviceId, Window> windows_;
  std::deque<StorageId> due_;             // parked, or with bytes saved while a copy ran
  std::map<CopyId, RunningCopy> copies_;  // oldest first
  // Leased entries by the identity of their storage: one storage may be saved in several epochs.
  std::unordered_map<std::uint64_t, std::uint64_t> leases_;
  std::uint64_t in_flight_bytes_ = 0;
  std::map<DeviceId, std::uint64_t> guessed_bytes_;
  std::uint64_t last_copy_ = 0;
  std::uint64_t last_event_ = 0;
  std::uint64_t last_epoch_ = 0;
  bool told_tier_full_ = false;
  Stats stats_;
};

}  // namespace ebbtide
