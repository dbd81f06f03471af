// Loading: which storages come back in one copy, and what has to be there before it is started.
#include <algorithm>
#include <utility>

#include "ebbtide/engine.h"
#include "ebbtide/error.h"

namespace ebbtide {

namespace {

std::uint64_t load_bytes(const Entry& entry) { return entry.valid.span().end; }

}  // namespace

// The storage and, where it lies packed with others, those of them that this pass still needs: each byte crosses once.
Load& Engine::begin_load(Entry& entry, PassId pass, LoadCause cause, Commands& commands) {
  const CopyId copy{++last_copy_};
  Load& load = loads_[copy];
  load.copy = copy;
  load.device = entry.source.device;
  add_to_load(load, entry, cause, commands);
  if (cause != LoadCause::kAsked) commands.push_back(alloc_command(entry));
  if (value(pass) == 0 && cause != LoadCause::kRun) return load;
  for (const StoredRange& part : entry.to_load()) {
    const std::vector<StorageId> members = parcels_.at(part.parcel).members;
    for (const StorageId id : members) {
      Entry& other = *registry_.find(id);
      if (cause == LoadCause::kRun) {
        if (!loads_with_run(other)) continue;
      } else if (other.epoch != entry.epoch || !wants_load(other, pass)) {
        continue;
      } else {
        begin_claims(other, pass);
      }
      add_to_load(load, other, cause == LoadCause::kRun ? cause : LoadCause::kGuess, commands);
      commands.push_back(alloc_command(other));
    }
  }
  return load;
}

Command Engine::alloc_command(const Entry& entry) {
  return {.kind = CommandKind::kAlloc,
          .storage = entry.id,
          .copy = entry.load,
          .stream = entry.stream,
          .nbytes = load_bytes(entry),
          .residue = entry.source.address % kAlignmentBytes};
}

bool Engine::wants_load(const Entry& entry, PassId pass) const {
  const bool served = entry.pass == pass && entry.unserved == 0;
  // Somebody may hold what this pass was given before: its other views must be views of that.
  const bool given = entry.pass == pass && (entry.restored == Restored::kReady || entry.restored == Restored::kLoading);
  return !entry.leased() && !entry.valid.empty() && !entry.restored_held && !entry.loading() && !entry.dying &&
         !served && !given;
}

void Engine::add_to_load(Load& load, Entry& entry, LoadCause cause, Commands& commands) {
  release_restored(entry, commands);
  registry_.unbind_restored(entry);
  no_longer_guess(entry);
  entry.restored = Restored::kAllocating;
  entry.load = load.copy;
  entry.asked_on = {};
  // What is copied or saved from now on is not part of this load: no memory is asked for it.
  entry.restored_valid = entry.valid;
  entry.unwanted = false;
  load.members.push_back(entry.id);
  ++load.allocating;
  if (cause == LoadCause::kAsked) return;
  entry.guess_bytes = load_bytes(entry);
  entry.loaded_by_run = cause == LoadCause::kRun;
  if (!entry.loaded_by_run) guessed_bytes_[entry.source.device] += entry.guess_bytes;
}

Commands Engine::allocated(StorageId storage, CopyId load, const StorageRef& restored, StreamRef stream) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry == nullptr || entry->load != load || entry->restored != Restored::kAllocating) {
    commands.push_back({.kind = CommandKind::kReleaseRestored, .storage = storage, .copy = load});
    return commands;
  }
  if (restored.nbytes < entry->restored_valid.span().end) {
    throw Error(ErrorKind::kUsage, "[Engine.allocated] storage " + std::to_string(value(storage)) + ": got " +
                                       format_bytes(restored.nbytes) + ", asked for " +
                                       format_bytes(entry->restored_valid.span().end) + ": allocate what kLoad says");
  }
  registry_.bind_restored(*entry, restored);
  hold_restored(*entry, true);
  entry->restored = Restored::kFetching;
  entry->restored_stream = stream;
  entry->restored_epoch = EpochId{last_epoch_};
  --loads_.at(load).allocating;
  start_load(load, commands);
  retry_waiting(commands);
  return commands;
}

Commands Engine::allocation_failed(StorageId storage, CopyId load) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry == nullptr || entry->load != load || entry->restored != Restored::kAllocating) return commands;
  if (entry->guess_bytes == 0) {
    // What was to come along is memory that the caller needs now.
    fail_load(load, {}, 0, commands);
    release_unclaimed(commands);
    retry_waiting(commands);
    return commands;
  }
  Load& of = loads_.at(load);
  --of.allocating;
  std::erase(of.members, storage);
  finish_load(*entry, load, false, commands);
  start_load(load, commands);
  retry_waiting(commands);
  return commands;
}

// Starts the copy when every storage of it has memory and every parcel is in the space.
void Engine::start_load(CopyId id, Commands& commands) {
  const auto found = loads_.find(id);
  if (found == loads_.end() || found->second.started || found->second.allocating > 0) return;
  for (const StorageId member : std::vector(found->second.members)) {
    Entry& entry = *registry_.find(member);
    if (!entry.dying) continue;
    std::erase(found->second.members, member);
    finish_load(entry, id, false, commands);
  }
  Load& load = found->second;
  if (load.members.empty()) {
    end_reading(load);
    loads_.erase(found);
    load_changed_.notify_all();
    return;
  }
  if (!fetch(load, commands)) return;

  std::vector<LoadPart> parts;
  std::map<StreamRef, EventId> after;
  Command command{.kind = CommandKind::kCopy, .storage = load.members.front(), .copy = id, .hop = Hop::kLoad};
  for (const StorageId member : load.members) {
    Entry& entry = *registry_.find(member);
    LoadPart part{{Tier::kDevice, entry.restored_ref.address, 0}, {}};
    for (const StoredRange& stored : entry.to_load()) {
      part.spans.push_back({stored.range, parcels_.at(stored.parcel).block.place.advanced(stored.byte_offset)});
    }
    parts.push_back(std::move(part));
    command.storages.push_back(member);
    entry.restored = Restored::kLoading;
    // The allocator may have handed out memory that work of this stream still reads.
    if (value(entry.restored_stream) != 0 && !after.contains(entry.restored_stream)) {
      const EventId event{++last_event_};
      after[entry.restored_stream] = event;
      commands.push_back(
          {.kind = CommandKind::kRecord, .storage = member, .event = event, .stream = entry.restored_stream});
    }
  }
  for (const auto& [stream, event] : after) command.after.push_back(event);
  std::vector<Block> whole;
  bool packed = false;
  for (const ParcelId parcel : load.reading) {
    const Parcel& from = parcels_.at(parcel);
    packed |= from.packed;
    if (from.packed && from.block.place.tier == Tier::kFile) whole.push_back(from.block);
    if (value(from.filling) != 0) command.after_copies.push_back(from.filling);
  }
  command.plan = packed ? plan_packed_restore(parts, whole) : plan_restore(parts.front().spans, parts.front().storage);
  RunningCopy running{
      .hop = Hop::kLoad, .device = {}, .moved = {}, .parcel = {}, .crossings = crossing_copies(command.plan)};
  for (const StorageId member : load.members) {
    const Entry& entry = *registry_.find(member);
    running.moved.push_back({member, entry.restored_valid.nbytes(), entry.label});
  }
  if (value(registry_.find(load.members.front())->restored_stream) != 0) {
    // In device order it is as good as done, and may be seen done only after the numbers were asked for.
    count_loaded(running);
    running.counted = true;
  }
  copies_[id] = std::move(running);
  load.started = true;
  commands.push_back(std::move(command));
  for (const StorageId member : load.members) {
    Entry& entry = *registry_.find(member);
    if (value(entry.asked_on) == 0) continue;
    order_after_load(entry, entry.asked_on, commands);
    if (value(entry.pass) == 0 || entry.unserved == 0) release_restored(entry, commands);
  }
  load_changed_.notify_all();
}

// Whether every parcel of the load is in the space; brings those that are not.
bool Engine::fetch(Load& load, Commands& commands) {
  bool there = true;
  for (const StorageId member : load.members) {
    for (const StoredRange& stored : registry_.find(member)->to_load()) {
      Parcel& parcel = parcels_.at(stored.parcel);
      if (std::ranges::find(load.reading, parcel.id) == load.reading.end()) {
        load.reading.push_back(parcel.id);
        ++parcel.readers;
      }
      if (parcel.in_space()) continue;
      there = false;
      if (value(parcel.moving) != 0) continue;
      const std::optional<Block> block = take_block(parcel.nbytes);
      if (block) {
        parcel.block = *block;
        parcel.fetching = true;
        parcel.moving = CopyId{++last_copy_};
        move(parcel, Hop::kFetch, commands);
      } else if (make_room(parcel.nbytes, commands)) {
        waiting_loads_.push_back(load.copy);
        return false;
      } else {
        fail_load(load.copy, {}, parcel.nbytes, commands);
        return false;
      }
    }
  }
  return there;
}

// Gives up a load that was not started.
void Engine::fail_load(CopyId id, CopyId cause, std::uint64_t nbytes, Commands& commands) {
  const auto found = loads_.find(id);
  if (found == loads_.end() || found->second.started) return;
  Load load = std::move(found->second);
  loads_.erase(found);
  end_reading(load);
  for (const StorageId member : load.members) {
    Entry* entry = registry_.find(member);
    if (entry == nullptr || entry->load != id) continue;
    if (value(cause) != 0 || nbytes > 0) {
      commands.push_back(
          {.kind = CommandKind::kLoadFailed, .storage = member, .copy = id, .cause = cause, .nbytes = nbytes});
    }
    finish_load(*entry, id, false, commands);
  }
}

void Engine::end_reading(Load& load) {
  for (const ParcelId id : std::exchange(load.reading, {})) {
    --parcels_.at(id).readers;
    tidy(id);
  }
}

void Engine::finish_load(Entry& entry, CopyId load, bool ok, Commands& commands) {
  if (entry.load != load || !entry.loading()) return;
  if (ok) {
    entry.restored = Restored::kReady;
    const bool needed = left_over(entry) || (value(entry.pass) != 0 && entry.unserved > 0);
    if (entry.unwanted || !needed) release_restored(entry, commands);
  } else {
    registry_.unbind_restored(entry);
    entry.restored = Restored::kNone;
    release_restored(entry, commands);
  }
  load_changed_.notify_all();
  if (entry.dying) finish_entry(entry, commands);
}

CopyId Engine::blocker(CopyId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = loads_.find(id);
  if (found == loads_.end() || found->second.started) return {};
  for (const ParcelId parcel : found->second.reading) {
    if (const CopyId moving = parcels_.at(parcel).moving; value(moving) != 0) return moving;
  }
  return found->second.allocating > 0 || copies_.empty() ? CopyId{} : copies_.begin()->first;
}

bool Engine::wait_allocated(StorageId storage, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return load_changed_.wait_for(lock, limit, [&] {
    const Entry* entry = registry_.find(storage);
    if (entry == nullptr || entry->restored == Restored::kNone) return true;
    const auto load = loads_.find(entry->load);
    return load == loads_.end() || load->second.started || (load->second.allocating == 0 && !growing_);
  });
}

}  // namespace ebbtide
