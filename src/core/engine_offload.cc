// Offloading: when a storage that left the window is copied, and when its memory is let go.
#include <algorithm>
#include <utility>

#include "ebbtide/engine.h"

namespace ebbtide {

namespace {

// A storage that stays held is looked at after 1, 2, 4 … saves, up to this power of two.
constexpr std::uint32_t kMostLooksBetween = 6;

}  // namespace

void Engine::look(Commands& commands, std::size_t keep_last_storages) {
  for (auto& [device, window] : windows_) {
    // At once, however many are parked: most storages are free when they leave the window.
    while (is_long(window, keep_last_storages)) {
      const std::optional<StorageId> left = pop_window(window);
      if (!left) break;
      probe(*registry_.find(*left), commands);
    }
  }
}

// Whether it holds more storages than are kept to recognise their later views by.
bool Engine::is_long(const Window& window, std::size_t keep_last_storages) const {
  if (window.storages() > keep_last_storages) return true;
  return window.storages() > kAlwaysRecognised && window.nbytes() > config_.keep_last_storages_bytes;
}

// Looks at `most` of the parked storages; those found held again and again less often, unless at `all`.
void Engine::look_at_parked(Commands& commands, std::size_t most, bool all) {
  for (; most > 0 && !due_.empty(); --most) {
    Entry* entry = registry_.find(due_.front());
    due_.pop_front();
    if (entry == nullptr || entry->lease != Lease::kDue) continue;
    if (all || entry->next_look <= saves_) {
      probe(*entry, commands);
    } else {
      due_.push_back(entry->id);
    }
  }
}

// Where a group or an epoch begins or ends: what is free by now crosses together.
void Engine::look_at_all(Commands& commands, std::size_t keep_last_storages) {
  look(commands, keep_last_storages);
  look_at_parked(commands, due_.size(), true);
  if (config_.pack_below_bytes > 0) commands.push_back({.kind = CommandKind::kGather});
}

std::optional<StorageId> Engine::pop_window(Window& window) {
  if (!config_.keep_last_groups || last_group_ == 0) return window.pop_over(config_.keep_last_bytes);
  // A group that runs is not copied before it has ended: its storages are in use, and cross together.
  const std::uint64_t ended = running_groups_ > 0 ? last_group_ - 1 : last_group_;
  const std::uint64_t kept = *config_.keep_last_groups;
  const std::uint64_t first_kept = kept == 0 ? ended + 1 : last_group_ >= kept ? last_group_ - kept + 1 : 0;
  return window.pop_before(GroupId{first_kept});
}

void Engine::probe(Entry& entry, Commands& commands) {
  set_lease(entry, Lease::kProbing);
  commands.push_back({.kind = CommandKind::kProbe, .storage = entry.id});
}

Commands Engine::probed(StorageId storage, const ProbeAnswer& answer) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry == nullptr) return commands;
  if (entry->lease == Lease::kInFlight && entry->asked) {
    if (!answer.counted) {
      commands.push_back({.kind = CommandKind::kWait, .storage = storage, .copy = entry->offload});
    } else if (answer.same && answer.intact && !entry->abandoned && !held_by_others(*entry, answer)) {
      let_go(*entry, commands);
    }
    return commands;
  }
  if (entry->lease != Lease::kProbing) return commands;
  if (!answer.same || !answer.intact) {
    leave_changed(*entry, answer, commands);
  } else if (held_by_others(*entry, answer)) {
    set_found_held(*entry, true);
    entry->next_look = saves_ + (std::uint64_t{1} << std::min(entry->looks++, kMostLooksBetween));
    set_lease(*entry, Lease::kDue);
    due_.push_back(storage);
  } else {
    set_found_held(*entry, false);
    leave_window(*entry, commands);
  }
  return commands;
}

void Engine::leave_window(Entry& entry, Commands& commands) {
  const std::uint64_t nbytes = entry.missing().nbytes();
  if (nbytes == 0) {
    release_lease(entry, commands);
  } else if (nbytes >= config_.pack_below_bytes) {
    offload({&entry}, commands);
  } else {
    set_lease(entry, Lease::kGathering);
    gathering_.push_back(entry.id);
    gathering_bytes_ += nbytes;
    if (gathering_bytes_ >= config_.pack_bytes) gather_locked(commands);
  }
}

Commands Engine::gather() {
  const std::lock_guard lock(mutex_);
  Commands commands;
  gather_locked(commands);
  return commands;
}

void Engine::gather_locked(Commands& commands) {
  std::map<DeviceId, std::vector<Entry*>> packs;
  std::map<DeviceId, std::uint64_t> nbytes;
  for (const StorageId id : std::exchange(gathering_, {})) {
    Entry* entry = registry_.find(id);
    if (entry == nullptr || entry->lease != Lease::kGathering) continue;
    const DeviceId device = entry->source.device;
    const std::uint64_t more = entry->missing().nbytes();
    if (nbytes[device] + more > config_.pack_bytes) {
      offload(std::exchange(packs[device], {}), commands);
      nbytes[device] = 0;
    }
    packs[device].push_back(entry);
    nbytes[device] += more;
  }
  gathering_bytes_ = 0;
  for (const auto& [device, pack] : packs) offload(pack, commands);
}

// All of `entries` lie on one device and cross in one copy.
void Engine::offload(const std::vector<Entry*>& entries, Commands& commands) {
  if (entries.empty() || start_offload(entries, commands)) return;
  std::uint64_t nbytes = 0;
  for (const Entry* entry : entries) nbytes += entry->missing().nbytes();
  if (!make_room(nbytes, commands)) {
    if (entries.size() > 1) {
      // Room for a part is better than room for nothing.
      const auto middle = entries.begin() + static_cast<std::ptrdiff_t>(entries.size() / 2);
      offload({entries.begin(), middle}, commands);
      offload({middle, entries.end()}, commands);
      return;
    }
    for (Entry* entry : entries) keep_on_device(*entry, commands);
    return;
  }
  std::vector<StorageId> waiting;
  for (Entry* entry : entries) {
    set_lease(*entry, Lease::kRoom);
    waiting.push_back(entry->id);
  }
  waiting_offloads_.push_back(std::move(waiting));
  bound_in_flight(commands);
}

bool Engine::start_offload(const std::vector<Entry*>& entries, Commands& commands) {
  const bool packed = entries.size() > 1;
  std::vector<PackPart> parts;
  for (const Entry* entry : entries) {
    parts.push_back({{Tier::kDevice, entry->source.address, 0}, entry->missing()});
  }
  PackLayout layout;
  if (packed) {
    layout = pack_layout(parts);
  } else {
    layout.parts.emplace_back();
    for (const ByteRange& range : parts.front().ranges.ranges()) {
      layout.parts.front().push_back({range, layout.nbytes});
      layout.nbytes += range.nbytes();
    }
  }
  const std::optional<Block> block = take_block(layout.nbytes);
  if (!block) return false;

  const CopyId copy{++last_copy_};
  const ParcelId id{++last_parcel_};
  Parcel& parcel = parcels_[id];
  parcel.id = id;
  parcel.nbytes = layout.nbytes;
  parcel.packed = packed;
  parcel.block = *block;
  parcel.filling = copy;
  Command command{.kind = CommandKind::kCopy, .storage = entries.front()->id, .copy = copy, .hop = Hop::kOffload};
  command.plan = packed ? plan_packed_offload(parts, layout, block->place)
                        : plan_offload(parts.front().storage, parts.front().ranges, block->place);
  std::map<StreamRef, EventId> after;
  RunningCopy running{.hop = Hop::kOffload,
                      .device = entries.front()->source.device,
                      .moved = {},
                      .parcel = id,
                      .crossings = crossing_copies(command.plan)};
  for (std::size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    entry.offload = copy;
    for (const PackedRange& range : layout.parts[i]) entry.copying.push_back({range.range, id, range.byte_offset});
    // Of one stream the latest event covers the others.
    for (const SavedEvent& saved : entry.events) after[saved.stream] = std::max(after[saved.stream], saved.event);
    entry.events.clear();
    entry.asked = false;
    entry.abandoned = false;
    set_lease(entry, Lease::kInFlight);
    parcel.members.push_back(entry.id);
    command.storages.push_back(entry.id);
    running.moved.push_back({entry.id, parts[i].ranges.nbytes(), entry.label});
  }
  for (const auto& [stream, event] : after) command.after.push_back(event);
  copies_[copy] = std::move(running);
  commands.push_back(std::move(command));
  bound_in_flight(commands);
  return true;
}

void Engine::bound_in_flight(Commands& commands) {
  if (in_flight_bytes_ > config_.in_flight_bytes) {
    release_retained(in_flight_bytes_ - config_.in_flight_bytes, commands);
  }
  std::uint64_t in_flight = in_flight_bytes_;
  if (in_flight > config_.in_flight_bytes && !waiting_offloads_.empty() && !copies_.empty()) {
    // There will be room, if at all, when something that runs is done.
    const auto& [copy, running] = *copies_.begin();
    commands.push_back({.kind = CommandKind::kWait, .storage = running.moved.front().storage, .copy = copy});
  }
  for (const auto& [copy, running] : copies_) {
    if (in_flight <= config_.in_flight_bytes) return;
    if (running.hop != Hop::kOffload) continue;
    const StorageId first = running.moved.front().storage;
    bool waits = false;
    for (const Moved& moved : running.moved) {
      Entry* entry = registry_.find(moved.storage);
      if (entry == nullptr || entry->offload != copy || entry->lease != Lease::kInFlight) continue;
      in_flight -= std::min(in_flight, entry->source.nbytes);
      // Memory let go of in device order is free no sooner than the copy is done: only waiting bounds it.
      if (value(entry->stream) == 0 || config_.in_flight_bytes > 0) {
        waits = true;
      } else if (!entry->asked) {
        entry->asked = true;
        commands.push_back({.kind = CommandKind::kProbe, .storage = entry->id});
      }
    }
    if (waits) commands.push_back({.kind = CommandKind::kWait, .storage = first, .copy = copy});
  }
}

// Nobody else holds the storage, so nobody can write to it: its memory may go to others in device order.
void Engine::let_go(Entry& entry, Commands& commands) {
  // Where another forward has saved it too, it is not free, and may be given to somebody.
  if (leases_.at(entry.source.identity) > 1) return;
  ByteRanges missing = entry.missing();
  for (const StoredRange& part : entry.copying) missing.subtract(part.range);
  if (!missing.empty()) return;
  for (const StoredRange& part : std::exchange(entry.copying, {})) {
    entry.stored.push_back(part);
    entry.valid.add(part.range);
  }
  stats_.freed_bytes += entry.source.nbytes;
  count_let_go(entry);
  linger(entry);
  commands.push_back(
      {.kind = CommandKind::kRecordStream, .storage = entry.id, .copy = std::exchange(entry.offload, {})});
  release_lease(entry, commands);
}

void Engine::count_let_go(const Entry& entry) {
  RunningCopy& running = copies_.at(entry.offload);
  for (Moved& moved : running.moved) {
    if (moved.storage != entry.id) continue;
    count_offloaded(moved);
    moved.counted = true;
  }
  if (!running.counted) stats_.d2h_copies += running.crossings;
  running.counted = true;
}

// The copy failed after its storage was let go of: the bytes are nowhere.
void Engine::lose(Entry& entry, ParcelId parcel, CopyId copy, Commands& commands) {
  for (const StoredRange& part : entry.stored) {
    if (part.parcel != parcel) continue;
    entry.valid.subtract(part.range);
    entry.restored_valid.subtract(part.range);
  }
  std::erase_if(entry.stored, [parcel](const StoredRange& part) { return part.parcel == parcel; });
  leave_parcel(entry, parcel);
  if (entry.loading()) fail_load(entry.load, copy, 0, commands);
}

// Whether the bytes are used.
bool Engine::finish_offload(Entry& entry, const Moved& moved, ParcelId parcel, bool ok, const ProbeAnswer& answer,
                            Commands& commands) {
  const std::vector<StoredRange> copied = std::exchange(entry.copying, {});
  entry.offload = {};
  set_lease(entry, Lease::kDue);
  const bool used = ok && answer.same && answer.intact && !entry.abandoned;
  if (!used) {
    leave_parcel(entry, parcel);
    if (!answer.same || !answer.intact) {
      leave_changed(entry, answer, commands);
    } else if (entry.dying) {
      pin(entry);
    } else if (ok) {
      due_.push_back(entry.id);
    } else {
      keep_on_device(entry, commands);
    }
  } else {
    for (const StoredRange& part : copied) {
      entry.stored.push_back(part);
      entry.valid.add(part.range);
    }
    count_offloaded(moved);
    if (!entry.missing().empty()) {
      due_.push_back(entry.id);
    } else if (entry.dying || held_by_others(entry, answer) || !retain(entry)) {
      (held_by_others(entry, answer) ? stats_.unfreed_bytes : stats_.freed_bytes) += entry.source.nbytes;
      release_lease(entry, commands);
    }
  }
  if (entry.dying) finish_entry(entry, commands);
  return used;
}

void Engine::leave_changed(Entry& entry, const ProbeAnswer& answer, Commands& commands) {
  entry.closed = true;
  // Plain autograd keeps what it can no longer use; here nobody may ask for it, so it need not stay.
  if (answer.spoiled) {
    set_found_held(entry, false);
    release_lease(entry, commands);
  } else {
    pin(entry);
  }
}

bool Engine::held_by_others(const Entry& entry, const ProbeAnswer& answer) const {
  const auto found = leases_.find(entry.source.identity);
  const std::uint64_t own = found == leases_.end() ? 0 : found->second - 1;
  return answer.holders > own;
}

void Engine::pin(Entry& entry) {
  set_found_held(entry, false);
  set_lease(entry, Lease::kPinned);
}

// The content is as saved, so later views join it: no second entry tries again for the same bytes.
void Engine::keep_on_device(Entry& entry, Commands& commands) {
  pin(entry);
  const bool disk = space_->tier() == Tier::kFile || backing_failed_ || backing_full_;
  stats_.keep(disk ? KeepReason::kDiskFull : KeepReason::kHostFull);
  if (told_tier_full_) return;
  told_tier_full_ = true;
  commands.push_back({.kind = CommandKind::kTierFull, .storage = entry.id});
}

}  // namespace ebbtide
