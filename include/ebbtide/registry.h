// Registry: one entry per storage, version and epoch; the tickets on it; and who is found by which identity.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "ebbtide/byte_ranges.h"
#include "ebbtide/parcel.h"
#include "ebbtide/storage_ref.h"
#include "ebbtide/types.h"
#include "ebbtide/view_meta.h"

namespace ebbtide {

// Why the session holds a reference to the saved storage.
enum class Lease : std::uint8_t {
  kNone,       // it does not: every wanted byte has a copy
  kWindow,     // saved just now
  kScheduled,  // waits for Engine::offload_run
  kDue,        // left the window, waits for the next probe
  kProbing,    // a probe was sent
  kGathering,  // nobody else holds it, waits for company to cross with
  kRoom,       // waits for room in the space
  kInFlight,   // a copy is running
  kRetained,   // every wanted byte has a copy, but a backward that has begun is about to ask for it
  kPinned,     // stays on the device for as long as a ticket lives
};

enum class Restored : std::uint8_t {
  kNone,
  kAllocating,
  kFetching,  // allocated; other storages of its load, or its bytes, are not where they are needed yet
  kLoading,   // its copy was started
  kReady,
};

struct SavedView {
  ViewMeta meta;
  ByteRange extent;
};

// All work on the storage that was queued on `stream` before `event` is done once the event is.
struct SavedEvent {
  StreamRef stream{};
  EventId event{};
};

struct Entry {
  StorageId id{};
  StorageRef source;
  std::uint64_t version = 0;
  EpochId epoch{};
  GroupId group{};  // the last one begun when it was saved last
  std::uint64_t group_in_epoch = 0;
  std::uint64_t need = 0;          // place in the order in which backward is expected to need it, backwards
  std::size_t label = 0;           // of the group it was saved in first, for the statistics
  StreamRef stream{};              // the first one it was saved on: whose pool its memory comes from
  std::vector<SavedEvent> events;  // what the next copy comes after, one a stream
  bool closed = false;             // takes no new views
  bool dying = false;              // no ticket left, a copy or an allocation still runs

  std::vector<RunId> runs;  // that it was saved in; it leaves the device with the last
  bool on_request = false;  // stays on the device unless Engine::request names it

  std::vector<SavedView> views;
  ByteRanges wanted;
  std::uint64_t live_tickets = 0;

  Lease lease = Lease::kNone;
  bool found_held = false;           // the last probe found other holders
  std::uint32_t looks = 0;           // probes that found them
  std::uint64_t next_look = 0;       // the save at which it is worth to look again
  ByteRanges valid;                  // bytes with a copy, finished or ahead of any load in device order
  std::vector<StoredRange> stored;   // where they are
  CopyId offload{};                  // the running copy
  std::vector<StoredRange> copying;  // where the running copy takes its bytes
  bool asked = false;                // a probe was sent, to let go of the lease before the copy is seen done
  bool abandoned = false;            // somebody was given the saved storage meanwhile and may write to it

  Restored restored = Restored::kNone;
  StorageRef restored_ref;
  StreamRef restored_stream{};    // that it was allocated on
  StreamRef asked_on{};           // a stream to tell so when the copy is started
  ByteRanges restored_valid;      // bytes that it has, or will have after the load
  CopyId load{};                  // the copy that fills or filled restored_ref
  EpochId restored_epoch{};       // the last one begun when it was allocated
  bool restored_held = false;     // the session keeps restored_ref alive
  bool unwanted = false;          // memory is short: let go of it as soon as it is loaded
  std::uint64_t guess_bytes = 0;  // > 0: loaded ahead, nobody has asked yet
  bool loaded_by_run = false;     // ahead of being asked for, because the caller said so

  PassId pass{};               // the pass that `unserved` counts for
  std::uint64_t unserved = 0;  // live tickets not served in it

  [[nodiscard]] bool leased() const { return lease != Lease::kNone; }
  [[nodiscard]] bool loading() const { return restored != Restored::kNone && restored != Restored::kReady; }
  [[nodiscard]] ByteRanges missing() const;
  // What a load into the restored storage reads.
  [[nodiscard]] std::vector<StoredRange> to_load() const;
};

struct TicketRecord {
  StorageId storage{};
  std::uint32_t view = 0;
  PassId served{};
};

// Not thread safe. References stay valid until the entry or ticket is erased.
class Registry {
 public:
  Entry& create(const StorageRef& source, std::uint64_t version, EpochId epoch);
  void erase(StorageId storage);
  // Nobody finds the entry by identity any more.
  void hide(Entry& entry);
  [[nodiscard]] Entry* find(StorageId storage);
  [[nodiscard]] const Entry* find(StorageId storage) const;
  [[nodiscard]] bool contains(StorageId storage) const { return entries_.contains(storage); }

  // The entry that takes new views of this storage in this epoch: by the saved storage, or by the restored one.
  [[nodiscard]] Entry* find_saved(std::uint64_t identity, EpochId epoch);
  [[nodiscard]] Entry* find_restored(std::uint64_t identity);
  void bind_restored(Entry& entry, const StorageRef& restored);
  void unbind_restored(Entry& entry);
  // No entry of the epoch is found by identity any more.
  void close_epoch(EpochId epoch);

  TicketId issue(Entry& entry, std::uint32_t view);
  [[nodiscard]] TicketRecord* ticket(TicketId ticket);
  void revoke(TicketId ticket);

  // Saved once more: backward is expected to need it before all that was saved earlier.
  void renew(Entry& entry, GroupId group);
  // Visits entries with a smaller `need`, largest first, until `visit` returns false.
  void walk_back(std::uint64_t need, const std::function<bool(Entry&)>& visit);
  void for_each(const std::function<void(Entry&)>& visit);
  [[nodiscard]] std::size_t entries() const { return entries_.size(); }
  [[nodiscard]] std::size_t tickets() const { return tickets_.size(); }

 private:
  struct Key {
    std::uint64_t identity;
    EpochId epoch;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const {
      return std::hash<std::uint64_t>{}(key.identity * 0x9E3779B97F4A7C15ULL ^ value(key.epoch));
    }
  };

  std::map<StorageId, Entry> entries_;
  std::map<std::uint64_t, Entry*> by_need_;
  std::unordered_map<Key, StorageId, KeyHash> saved_;
  std::unordered_map<std::uint64_t, StorageId> restored_;
  std::unordered_map<std::uint64_t, TicketRecord> tickets_;
  std::uint64_t last_storage_ = 0;
  std::uint64_t last_ticket_ = 0;
  std::uint64_t last_need_ = 0;
};

}  // namespace ebbtide
