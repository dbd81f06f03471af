#include "ebbtide/engine.h"

#include <algorithm>
#include <limits>

#include "ebbtide/error.h"

namespace ebbtide {

Engine::Engine(const EngineConfig& config, std::shared_ptr<BlockSpace> space, std::shared_ptr<BlockSpace> backing)
    : config_(config), space_(std::move(space)), backing_(std::move(backing)) {
  if (space_ == nullptr) throw Error(ErrorKind::kUsage, "[Engine] no tier was given: pass a HostPool or a SpillFile");
}

Engine::~Engine() {
  for (const auto& [id, parcel] : parcels_) {
    if (parcel.block.nbytes > 0) space_->free(parcel.block);
    if (parcel.backing.nbytes > 0) backing_->free(parcel.backing);
  }
}

EpochId Engine::begin_epoch() {
  const std::lock_guard lock(mutex_);
  growth_refused_ = false;
  backing_failed_ = false;
  return EpochId{++last_epoch_};
}

Commands Engine::end_epoch(EpochId epoch) {
  const std::lock_guard lock(mutex_);
  registry_.close_epoch(epoch);
  groups_in_epoch_.erase(epoch);
  Commands commands;
  look_at_all(commands, 0);
  return commands;
}

Commands Engine::begin_group(EpochId epoch, std::size_t label) {
  const std::lock_guard lock(mutex_);
  ++last_group_;
  ++running_groups_;
  ++groups_in_epoch_[epoch];
  if (group_stats_.size() <= label) group_stats_.resize(label + 1);
  ++group_stats_[label].runs;
  Commands commands;
  look_at_all(commands, std::min<std::size_t>(config_.keep_last_storages, kAlwaysRecognised));
  return commands;
}

Commands Engine::end_group() {
  const std::lock_guard lock(mutex_);
  if (running_groups_ > 0) --running_groups_;
  Commands commands;
  look_at_all(commands, std::min<std::size_t>(config_.keep_last_storages, kAlwaysRecognised));
  return commands;
}

Commands Engine::drop(TicketId ticket) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  const TicketRecord* record = registry_.ticket(ticket);
  if (record == nullptr) return commands;
  Entry& entry = *registry_.find(record->storage);
  const bool unserved = record->served != entry.pass;
  registry_.revoke(ticket);
  if (entry.live_tickets == 0) {
    finish_entry(entry, commands);
    retry_waiting(commands);
  } else if (value(entry.pass) != 0 && unserved && entry.unserved > 0 && --entry.unserved == 0) {
    give_out(entry, entry.pass, commands);
  }
  return commands;
}

Commands Engine::recover(const std::vector<CopyId>& running) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  growing_ = false;
  running_groups_ = 0;
  backwards_.clear();
  release_retained(std::numeric_limits<std::uint64_t>::max(), commands);
  std::vector<CopyId> lost;
  for (const auto& [copy, of] : copies_) {
    if (std::find(running.begin(), running.end(), copy) == running.end()) lost.push_back(copy);
  }
  const bool backing_failed = backing_failed_;
  for (const CopyId copy : lost) {
    // Storages that are still there stay: not as for a tier that is full.
    finish_copy(copy, false, std::vector<ProbeAnswer>(copies_.at(copy).moved.size(), {.same = false}), commands);
  }
  backing_failed_ = backing_failed;
  std::vector<CopyId> unstarted;
  for (const auto& [copy, load] : loads_) {
    if (!load.started) unstarted.push_back(copy);
  }
  for (const CopyId copy : unstarted) fail_load(copy, {}, 0, commands);
  registry_.for_each([&](Entry& entry) {
    entry.asked = false;
    if (entry.lease != Lease::kProbing) return;
    set_lease(entry, Lease::kDue);
    due_.push_back(entry.id);
  });
  room_changed_ = true;
  retry_waiting(commands);
  return commands;
}

bool Engine::knows(StorageId storage) const {
  const std::lock_guard lock(mutex_);
  return registry_.contains(storage);
}

std::size_t Engine::label_of(StorageId storage) const {
  const std::lock_guard lock(mutex_);
  const Entry* entry = registry_.find(storage);
  return entry == nullptr ? 0 : entry->label;
}

bool Engine::running(CopyId copy) const {
  const std::lock_guard lock(mutex_);
  return copies_.contains(copy);
}

void Engine::kept(KeepReason reason, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  ++stats_.saved_tensors;
  stats_.saved_bytes += nbytes;
  stats_.keep(reason);
}

Stats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.entries = registry_.entries();
  return stats;
}

std::vector<GroupStats> Engine::group_stats() const {
  const std::lock_guard lock(mutex_);
  return group_stats_;
}

std::uint64_t Engine::spill_looks() const {
  const std::lock_guard lock(mutex_);
  return spill_looks_;
}

void Engine::reset_stats() {
  const std::lock_guard lock(mutex_);
  stats_.reset();
  for (GroupStats& group : group_stats_) group = {};
}

Commands Engine::completed(CopyId copy, bool ok, const std::vector<ProbeAnswer>& answers) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  if (!copies_.contains(copy)) return commands;
  finish_copy(copy, ok, answers, commands);
  retry_waiting(commands);
  return commands;
}

void Engine::finish_copy(CopyId copy, bool ok, const std::vector<ProbeAnswer>& answers, Commands& commands) {
  const RunningCopy running = copies_.at(copy);
  copies_.erase(copy);
  lingering_bytes_ -= running.lingering_bytes;
  room_changed_ = true;  // what was read or written can be moved on now
  switch (running.hop) {
    case Hop::kOffload: {
      parcels_.at(running.parcel).filling = {};
      // Before a lease among them is let go of: one storage may be in the copy for entries of several epochs.
      std::vector<ProbeAnswer> now = answers;
      for (std::size_t i = 0; i < std::min(now.size(), running.moved.size()); ++i) {
        const Entry* entry = registry_.find(running.moved[i].storage);
        if (entry != nullptr && !held_by_others(*entry, now[i])) now[i].holders = 0;
      }
      bool used = false;
      for (std::size_t i = 0; i < running.moved.size(); ++i) {
        const Moved& moved = running.moved[i];
        Entry* entry = registry_.find(moved.storage);
        if (entry != nullptr && entry->offload == copy) {
          const ProbeAnswer answer = i < now.size() ? now[i] : ProbeAnswer{.same = !ok};
          used |= finish_offload(*entry, moved, running.parcel, ok, answer, commands);
        } else if (ok) {
          if (!moved.counted) count_offloaded(moved);
          used = true;
        } else if (entry != nullptr) {
          lose(*entry, running.parcel, copy, commands);
        }
      }
      if (used && !running.counted) stats_.d2h_copies += running.crossings;
      tidy(running.parcel);
      spill_ahead(commands);
      break;
    }
    case Hop::kLoad: {
      if (ok && !running.counted) count_loaded(running);
      for (const Moved& moved : running.moved) {
        if (Entry* entry = registry_.find(moved.storage)) finish_load(*entry, copy, ok, commands);
      }
      end_reading(loads_.at(copy));
      loads_.erase(copy);
      break;
    }
    case Hop::kSpill:
    case Hop::kFetch:
      finish_move(running.hop, running.parcel, ok, commands);
      break;
  }
}

void Engine::set_lease(Entry& entry, Lease lease) {
  const auto in_flight = [](Lease of) {
    return of == Lease::kInFlight || of == Lease::kRoom || of == Lease::kRetained;
  };
  if (in_flight(entry.lease) != in_flight(lease)) {
    in_flight(lease) ? in_flight_bytes_ += entry.source.nbytes : in_flight_bytes_ -= entry.source.nbytes;
  }
  const bool before = entry.leased();
  entry.lease = lease;
  if (before == entry.leased()) return;
  std::uint64_t& leases = leases_[entry.source.identity];
  if (entry.leased()) {
    if (leases++ == 0) stats_.device_bytes += entry.source.nbytes;
  } else if (--leases == 0) {
    stats_.device_bytes -= entry.source.nbytes;
    leases_.erase(entry.source.identity);
  }
  note_peak();
}

// Let go of in the order of the copy stream: free when what is queued there by now is done.
void Engine::linger(const Entry& entry) {
  for (auto it = copies_.rbegin(); it != copies_.rend(); ++it) {
    RunningCopy& running = it->second;
    if (running.hop != Hop::kOffload || running.device != entry.source.device) continue;
    running.lingering_bytes += entry.source.nbytes;
    lingering_bytes_ += entry.source.nbytes;
    return;
  }
}

void Engine::note_peak() { peak_held_bytes_ = held_bytes() == 0 ? 0 : std::max(peak_held_bytes_, held_bytes()); }

void Engine::release_lease(Entry& entry, Commands& commands) {
  if (!entry.leased()) return;
  set_lease(entry, Lease::kNone);
  commands.push_back({.kind = CommandKind::kReleaseLease, .storage = entry.id});
}

void Engine::set_found_held(Entry& entry, bool held) {
  if (held && !entry.found_held) ++stats_.parked;
  if (!held && entry.found_held) --stats_.parked;
  entry.found_held = held;
}

void Engine::hold_restored(Entry& entry, bool held) {
  if (held && !entry.restored_held) stats_.device_bytes += entry.restored_ref.nbytes;
  if (!held && entry.restored_held) stats_.device_bytes -= entry.restored_ref.nbytes;
  entry.restored_held = held;
}

void Engine::finish_entry(Entry& entry, Commands& commands) {
  registry_.hide(entry);
  entry.dying = true;
  if (entry.lease == Lease::kInFlight && value(entry.stream) != 0) {
    // Nobody reads the copy any more; it only has to be over before the memory is somebody else's.
    commands.push_back({.kind = CommandKind::kRecordStream, .storage = entry.id, .copy = entry.offload});
    linger(entry);
    release_lease(entry, commands);
  }
  const bool copying = entry.lease == Lease::kInFlight;
  if (entry.leased() && !copying) {
    const bool scheduled = entry.lease == Lease::kScheduled && !entry.on_request;
    if (windows_[entry.source.device].remove(entry.id) || scheduled) stats_.keep(KeepReason::kLast);
    set_found_held(entry, false);
    release_lease(entry, commands);
  }
  const bool waits = entry.loading() && !(entry.restored == Restored::kLoading && value(entry.restored_stream) != 0);
  if (waits) return;
  release_restored(entry, commands);
  if (copying) return;

  for (const StoredRange& part : entry.stored) leave_parcel(entry, part.parcel);
  for (const StoredRange& part : entry.copying) leave_parcel(entry, part.parcel);
  leave_runs(entry);
  commands.push_back({.kind = CommandKind::kForget, .storage = entry.id});
  registry_.erase(entry.id);
}

GroupStats& Engine::stats_of(std::size_t label) {
  if (group_stats_.size() <= label) group_stats_.resize(label + 1);
  return group_stats_[label];
}

void Engine::count_loaded(const RunningCopy& running) {
  stats_.h2d_copies += running.crossings;
  for (const Moved& moved : running.moved) {
    stats_.h2d_bytes += moved.nbytes;
    stats_of(moved.label).h2d_bytes += moved.nbytes;
  }
}

void Engine::count_offloaded(const Moved& moved) {
  stats_.d2h_bytes += moved.nbytes;
  stats_of(moved.label).d2h_bytes += moved.nbytes;
  if (space_->tier() == Tier::kFile) stats_.spilled_bytes += moved.nbytes;
}

}  // namespace ebbtide
