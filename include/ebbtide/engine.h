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
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ebbtide/block_space.h"
#include "ebbtide/command.h"
#include "ebbtide/config.h"
#include "ebbtide/load.h"
#include "ebbtide/parcel.h"
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
  std::size_t label = 0;    // of the group that runs on this thread, for the statistics; 0: none
  RunId run{};              // what is new is copied when offload_run says so; none: when it leaves the window
  bool on_request = false;  // of a run: only if `request` names the storage
  StreamRef stream{};       // current at pack; none for memory whose work is synchronous
  bool forced = false;      // a user policy wants it moved, whatever its size
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
  CopyId load{};              // kShared, kPending, kLoad: the copy that fills it
  bool allocating = false;    // kPending: another thread is getting memory for it
  std::uint64_t nbytes = 0;   // kLoad: what to allocate
  std::uint64_t residue = 0;  // kLoad: its address modulo kAlignmentBytes
  StreamRef stream{};         // kLoad: where to allocate it
  // To be run after kLoad was answered: what crosses in the same copy, prefetches and releases.
  Commands commands;
};

struct ProbeAnswer {
  // References besides this entry's lease; 0 when the framework cannot tell. The leases of other entries on the same
  // storage may be among them: the engine takes them off.
  std::uint64_t holders = 0;
  bool counted = true;   // whether the framework can tell
  bool same = true;      // address and nbytes are those of the save
  bool intact = true;    // no in-place counter moved since the saves
  bool spoiled = false;  // every one moved: whoever asks for a saved view is refused
};

// Storages of a run with a live ticket, by where they are.
struct RunState {
  std::size_t scheduled = 0;  // not told to leave
  std::size_t leaving = 0;    // told so: held by others, waiting, or on their way
  std::size_t away = 0;       // in a tier alone
  std::size_t coming = 0;
  std::size_t back = 0;
  std::size_t staying = 0;  // on the device for as long as a ticket lives
};

class Engine {
 public:
  // `space` is where offloaded bytes go; `backing`, where there is one, a file for what the space cannot hold.
  Engine(const EngineConfig& config, std::shared_ptr<BlockSpace> space, std::shared_ptr<BlockSpace> backing = nullptr);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Gives every block back. No copy may be running.
  ~Engine();

  // --- forward
  [[nodiscard]] EpochId begin_epoch();
  // Every parked storage is looked at once more; entries of the epoch take no new views.
  [[nodiscard]] Commands end_epoch(EpochId epoch);

  // A group begins: what is saved from now on is scheduled together. `label` (from 1) is what its statistics are added
  // up by. The commands move out what is no longer among the last keep_last_groups.
  [[nodiscard]] Commands begin_group(EpochId epoch, std::size_t label);
  [[nodiscard]] Commands end_group();

  // --- groups whose copies the caller starts, such as the schedule of a pipeline
  // A run of the group with this label (from 1). What is saved in several runs leaves with the last of them and comes
  // back with the first that is loaded. Nothing of a run is loaded on a guess.
  [[nodiscard]] RunId open_run(std::size_t label);
  // The storage is to be offloaded with the run although it was, or will be, saved in it `on_request`. Its identity
  // must not be issued anew before `close_run`.
  void request(RunId run, std::uint64_t identity);
  // What was saved in the run so far leaves the device as soon as nobody else holds it; again: what others held then is
  // looked at once more.
  [[nodiscard]] Commands offload_run(RunId run);
  // Lets go of what is on its way: at once in device order, on memory whose work is synchronous after waiting.
  [[nodiscard]] Commands let_go_run(RunId run);
  // What the run has in a tier comes back, the newest first; held until it was asked for, `release_run`, or memory is
  // short.
  [[nodiscard]] Commands load_run(RunId run);
  // The storages of the run that are loading, and the copies that bring them.
  [[nodiscard]] std::vector<std::pair<StorageId, CopyId>> loads_of(RunId run) const;
  // Work issued on the stream from now on comes after those loads.
  [[nodiscard]] Commands order_after_run(RunId run, StreamRef stream);
  // Lets go of what was loaded and not asked for; the tiers keep it.
  [[nodiscard]] Commands release_run(RunId run);
  // What has not left yet stays on the device for as long as its tickets live.
  [[nodiscard]] Commands keep_run(RunId run);
  // Nothing more is saved in it or asked of it; what it has loaded is let go of.
  [[nodiscard]] Commands close_run(RunId run);
  [[nodiscard]] RunState run_state(RunId run) const;

  // A tensor that stays on the device for a reason the session knows.
  void kept(KeepReason reason, std::uint64_t nbytes);
  // A tensor saved for backward. Throws Error(kUsage) for impossible view metadata. After kJoined and kDuplicate the
  // session checks the counters of the earlier saves; where one moved it drops the ticket and saves again as `spoiled`.
  [[nodiscard]] SaveVerdict save(const SaveRequest& request);
  // A ticket's destructor.
  [[nodiscard]] Commands drop(TicketId ticket);

  // --- reports of the session
  [[nodiscard]] Commands probed(StorageId storage, const ProbeAnswer& answer);
  [[nodiscard]] Commands gather();
  // `ok`: every byte was copied. `answers` are as of now, one for each storage of the command; they matter for
  // offloads.
  [[nodiscard]] Commands completed(CopyId copy, bool ok, const std::vector<ProbeAnswer>& answers);
  // The answer to kGrow.
  [[nodiscard]] Commands grown(bool ok);
  // The answer to kLoad and kAlloc: `restored`, allocated on `stream` for `load`, takes the place of an earlier one,
  // which the session lets go of, and is held until kReleaseRestored (which comes at once where the load was given up).
  // Throws Error(kUsage) when it is smaller than asked.
  [[nodiscard]] Commands allocated(StorageId storage, CopyId load, const StorageRef& restored, StreamRef stream);
  // Where somebody asked for the storage, lets go of everything that is held for tickets not asked for yet, waiting for
  // guesses that are loading: the caller may call `restore` and allocate once more. A guess is only cancelled.
  [[nodiscard]] Commands allocation_failed(StorageId storage, CopyId load);

  // After an exception cut the session short: what it was asked for and never reported counts as failed. `running` are
  // the copies that will still be reported. Afterwards nothing waits for an answer that does not come.
  [[nodiscard]] Commands recover(const std::vector<CopyId>& running);

  [[nodiscard]] bool knows(StorageId storage) const;
  // Of the group that the storage was saved in first; 0: none, or the storage is not known.
  [[nodiscard]] std::size_t label_of(StorageId storage) const;
  // Whether the copy was asked for and not reported yet.
  [[nodiscard]] bool running(CopyId copy) const;

  // --- backward
  // `live`: the session holds the saved storage, unchanged. `shared`: it holds the restored one. `pass` 0 means no
  // backward is running: nothing is claimed or kept for others. `stream` is the one that will use it: commands order
  // its later work after the load. Throws Error(kDevice) when the bytes are nowhere.
  [[nodiscard]] RestoreVerdict restore(TicketId ticket, PassId pass, bool live, bool shared, StreamRef stream = {});
  // The copy that has to be done before this load can be started; none when it was started, failed or is not known.
  [[nodiscard]] CopyId blocker(CopyId load) const;
  // Blocks until memory for `storage`, and for what comes back in the same copy, is not being allocated by another
  // thread, at most for `limit`; returns whether it is so. Call without the GIL.
  bool wait_allocated(StorageId storage, std::chrono::milliseconds limit = std::chrono::hours(1));
  // The pass is over: nothing it loaded is kept any more, but for guesses that nobody has asked for.
  [[nodiscard]] Commands end_pass(PassId pass);

  [[nodiscard]] Stats stats() const;
  // By label; the first is what was saved outside of groups.
  [[nodiscard]] std::vector<GroupStats> group_stats() const;
  void reset_stats();
  // How many parcels were looked at so far to find some that may move on into the backing.
  [[nodiscard]] std::uint64_t spill_looks() const;

 private:
  struct Run {
    std::set<StorageId> members;
    std::set<std::uint64_t> requested;  // identities
  };
  // Storages may be forgotten before their copy is seen done.
  struct Moved {
    StorageId storage{};
    std::uint64_t nbytes = 0;
    std::size_t label = 0;
    bool counted = false;  // in the statistics
  };
  struct RunningCopy {
    Hop hop{};
    DeviceId device{};  // kOffload
    std::vector<Moved> moved;
    ParcelId parcel{};  // kOffload, kSpill, kFetch
    std::uint64_t crossings = 0;
    bool counted = false;               // its crossings are in the statistics
    std::uint64_t lingering_bytes = 0;  // let go of before it was seen done: not free before that either
  };

  // engine_save.cc
  Entry* find_join(const SaveRequest& request, ByteRange range);
  TicketId issue(Entry& entry, std::uint32_t view);
  void want(Entry& entry, ByteRange range, const SaveRequest& request, SaveVerdict& verdict);
  void follow(Entry& entry, const SaveRequest& request, bool new_bytes, Commands& commands);

  // engine_run.cc
  void join_run(Entry& entry, const SaveRequest& request, bool is_new);
  void leave_runs(const Entry& entry);
  [[nodiscard]] std::vector<StorageId> members_of(RunId run) const;
  [[nodiscard]] static bool loads_with_run(const Entry& entry);
  void release_loaded(RunId run, Commands& commands);

  // engine_offload.cc
  void look(Commands& commands, std::size_t keep_last_storages);
  [[nodiscard]] bool is_long(const Window& window, std::size_t keep_last_storages) const;
  void look_at_parked(Commands& commands, std::size_t most, bool all);
  void look_at_all(Commands& commands, std::size_t keep_last_storages);
  [[nodiscard]] std::optional<StorageId> pop_window(Window& window);
  void probe(Entry& entry, Commands& commands);
  void leave_window(Entry& entry, Commands& commands);
  void gather_locked(Commands& commands);
  [[nodiscard]] bool start_offload(const std::vector<Entry*>& entries, Commands& commands);
  void offload(const std::vector<Entry*>& entries, Commands& commands);
  void bound_in_flight(Commands& commands);
  void let_go(Entry& entry, Commands& commands);
  void lose(Entry& entry, ParcelId parcel, CopyId copy, Commands& commands);
  [[nodiscard]] bool finish_offload(Entry& entry, const Moved& moved, ParcelId parcel, bool ok,
                                    const ProbeAnswer& answer, Commands& commands);
  void leave_changed(Entry& entry, const ProbeAnswer& answer, Commands& commands);
  [[nodiscard]] bool held_by_others(const Entry& entry, const ProbeAnswer& answer) const;
  void pin(Entry& entry);
  void keep_on_device(Entry& entry, Commands& commands);

  // engine_room.cc
  [[nodiscard]] std::optional<Block> take_block(std::uint64_t nbytes);
  void give_block(Parcel& parcel);
  void give_backing(Parcel& parcel);
  // Whether something was begun, or is running, that will make room.
  [[nodiscard]] bool make_room(std::uint64_t nbytes, Commands& commands);
  void spill_ahead(Commands& commands);
  void spill_while(const std::function<bool()>& more, Commands& commands);
  [[nodiscard]] bool spill(Parcel& parcel, Commands& commands);
  void move(const Parcel& parcel, Hop hop, Commands& commands);
  void retry_waiting(Commands& commands);
  void finish_move(Hop hop, ParcelId id, bool ok, Commands& commands);
  void leave_parcel(const Entry& entry, ParcelId id);
  void tidy(ParcelId id);

  // engine_restore.cc
  void claim(Entry& entry, TicketRecord& ticket, PassId pass);
  void begin_claims(Entry& entry, PassId pass);
  void order_after_load(Entry& entry, StreamRef stream, Commands& commands);
  void give_out(Entry& entry, PassId pass, Commands& commands);
  [[nodiscard]] std::uint64_t given_out_bytes();
  void give_saved(Entry& entry, Commands& commands);
  void prepare_for_writes(Entry& entry, Commands& commands);
  void fail_guesses(Commands& commands);
  void prefetch(const Entry& after, PassId pass, Commands& commands);
  [[nodiscard]] bool may_guess(DeviceId device, std::uint64_t nbytes);
  [[nodiscard]] static bool left_over(const Entry& entry);
  void release_left_over(Commands& commands);
  [[nodiscard]] bool awaited(const Entry& entry) const;
  [[nodiscard]] bool retain(Entry& entry);
  void let_go_of_retained(Entry& entry, Commands& commands);
  void release_retained(std::uint64_t least_bytes, Commands& commands);
  void no_longer_guess(Entry& entry);
  void release_restored(Entry& entry, Commands& commands);
  void release_unclaimed(Commands& commands);

  // engine_load.cc
  [[nodiscard]] Load& begin_load(Entry& entry, PassId pass, LoadCause cause, Commands& commands);
  void add_to_load(Load& load, Entry& entry, LoadCause cause, Commands& commands);
  [[nodiscard]] bool wants_load(const Entry& entry, PassId pass) const;
  [[nodiscard]] static Command alloc_command(const Entry& entry);
  void start_load(CopyId id, Commands& commands);
  [[nodiscard]] bool fetch(Load& load, Commands& commands);
  void fail_load(CopyId id, CopyId cause, std::uint64_t nbytes, Commands& commands);
  void end_reading(Load& load);
  void finish_load(Entry& entry, CopyId load, bool ok, Commands& commands);

  // engine.cc
  void finish_copy(CopyId copy, bool ok, const std::vector<ProbeAnswer>& answers, Commands& commands);
  void set_lease(Entry& entry, Lease lease);
  void release_lease(Entry& entry, Commands& commands);
  void set_found_held(Entry& entry, bool held);
  void hold_restored(Entry& entry, bool held);
  void finish_entry(Entry& entry, Commands& commands);
  [[nodiscard]] GroupStats& stats_of(std::size_t label);
  void count_offloaded(const Moved& moved);
  void count_let_go(const Entry& entry);
  void linger(const Entry& entry);
  // Device memory that the engine holds or has let go of too early to be free.
  [[nodiscard]] std::uint64_t held_bytes() const { return stats_.device_bytes + lingering_bytes_; }
  void note_peak();
  void count_loaded(const RunningCopy& running);

  const EngineConfig config_;
  const std::shared_ptr<BlockSpace> space_;
  const std::shared_ptr<BlockSpace> backing_;

  mutable std::mutex mutex_;
  std::condition_variable load_changed_;
  Registry registry_;
  std::map<DeviceId, Window> windows_;
  std::deque<StorageId> due_;             // parked, or with bytes saved while a copy ran
  std::map<CopyId, RunningCopy> copies_;  // oldest first
  std::map<ParcelId, Parcel> parcels_;    // oldest first
  std::map<RunId, Run> runs_;
  std::set<ParcelId> spillable_;  // oldest first; some of them not any more
  std::uint64_t spill_looks_ = 0;
  std::map<CopyId, Load> loads_;  // not done
  std::vector<StorageId> gathering_;
  std::uint64_t gathering_bytes_ = 0;
  std::deque<std::vector<StorageId>> waiting_offloads_;  // for room, each to cross together
  std::deque<CopyId> waiting_loads_;                     // for room
  bool growing_ = false;
  bool growth_refused_ = false;  // until the next epoch
  bool room_changed_ = false;
  bool backing_failed_ = false;  // until the next epoch
  bool backing_full_ = false;    // it refused a parcel last
  std::uint64_t spilling_bytes_ = 0;
  // Leased entries by the identity of their storage: one storage may be saved in several epochs.
  std::unordered_map<std::uint64_t, std::uint64_t> leases_;
  std::uint64_t in_flight_bytes_ = 0;
  std::uint64_t lingering_bytes_ = 0;
  std::uint64_t peak_held_bytes_ = 0;  // of forward, since nothing was held
  std::map<DeviceId, std::uint64_t> guessed_bytes_;
  // How far back guesses have come, by pass, epoch and device: a `need`.
  std::map<std::tuple<PassId, EpochId, DeviceId>, std::uint64_t> guessed_to_;
  // The backwards that run, by epoch and pass: the smallest `need` asked for.
  std::map<std::pair<EpochId, PassId>, std::uint64_t> backwards_;
  std::deque<std::pair<StorageId, std::uint64_t>> given_out_;  // the last few, with their bytes
  std::deque<StorageId> retained_;                             // oldest first, some of them not any more
  std::uint64_t last_group_ = 0;
  std::uint64_t last_run_ = 0;
  std::uint64_t running_groups_ = 0;
  std::map<EpochId, std::uint64_t> groups_in_epoch_;
  std::uint64_t last_copy_ = 0;
  std::uint64_t last_parcel_ = 0;
  std::uint64_t last_event_ = 0;
  std::uint64_t last_epoch_ = 0;
  std::uint64_t saves_ = 0;
  bool told_tier_full_ = false;
  Stats stats_;
  std::vector<GroupStats> group_stats_;
};

}  // namespace ebbtide
