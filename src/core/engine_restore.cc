// Restoring: where a ticket's bytes are now, and what is loaded ahead of being asked for.
#include "ebbtide/engine.h"
#include "ebbtide/error.h"

namespace ebbtide {

namespace {

// How far back a guess looks past entries that need no load.
constexpr int kPrefetchSteps = 64;

std::uint64_t load_bytes(const Entry& entry) { return entry.valid.span().end; }

std::uint64_t load_residue(const Entry& entry) { return entry.source.address % kAlignmentBytes; }

}  // namespace

RestoreVerdict Engine::restore(TicketId ticket, PassId pass, bool live, bool shared) {
  const std::lock_guard lock(mutex_);
  TicketRecord* record = registry_.ticket(ticket);
  if (record == nullptr) {
    throw Error(ErrorKind::kUsage, "[Engine.restore] ticket " + std::to_string(value(ticket)) +
                                       " was dropped: a saved tensor was asked for after its graph was freed");
  }
  Entry& entry = *registry_.find(record->storage);
  const ByteRange range = entry.views[record->view].extent;

  RestoreVerdict verdict;
  verdict.storage = entry.id;
  if (live) {
    verdict.outcome = RestoreOutcome::kLive;
    ++stats_.live_hits;
    // Whoever gets the storage may resize or write it: not under a copy that reads it.
    if (entry.lease == Lease::kInFlight) {
      verdict.commands.push_back({.kind = CommandKind::kWait, .storage = entry.id, .copy = entry.offload});
    }
  } else if (entry.loading()) {
    verdict.outcome = RestoreOutcome::kPending;
    if (entry.restored == Restored::kLoading) verdict.load = entry.load;
    entry.unwanted = false;
    // A guess of a pass that is over: from now on it is for this one, and is kept when it arrives.
    if (value(pass) != 0) begin_claims(entry, pass);
    return verdict;
  } else if (shared && entry.restored == Restored::kReady && entry.restored_valid.contains(range)) {
    verdict.outcome = RestoreOutcome::kShared;
    verdict.load = entry.load;
    if (entry.guess_bytes > 0) ++stats_.prefetch_hits;
    no_longer_guess(entry);
  } else if (entry.valid.contains(range)) {
    verdict.outcome = RestoreOutcome::kLoad;
    verdict.nbytes = load_bytes(entry);
    verdict.residue = load_residue(entry);
    ++stats_.prefetch_misses;
    begin_load(entry, false);
  } else {
    throw Error(ErrorKind::kDevice, "[Engine.restore] storage " + std::to_string(value(entry.id)) + ": " +
                                        format_bytes(range.nbytes()) +
                                        " are neither on the device nor in a tier: run the forward again");
  }
  claim(entry, *record, pass);
  if (entry.unserved == 0 && entry.restored == Restored::kReady) release_restored(entry, verdict.commands);
  if (value(pass) != 0) prefetch(entry, pass, verdict.commands);
  return verdict;
}

void Engine::claim(Entry& entry, TicketRecord& ticket, PassId pass) {
  if (value(pass) == 0) return;
  begin_claims(entry, pass);
  if (ticket.served == pass) return;
  ticket.served = pass;
  if (entry.unserved > 0) --entry.unserved;
}

void Engine::begin_claims(Entry& entry, PassId pass) {
  if (entry.pass == pass) return;
  entry.pass = pass;
  entry.unserved = entry.live_tickets;
}

void Engine::begin_load(Entry& entry, bool guess) {
  registry_.unbind_restored(entry);
  no_longer_guess(entry);
  entry.restored = Restored::kAllocating;
  // What is copied or saved from now on is not part of this load: no memory is asked for it.
  entry.restored_valid = entry.valid;
  entry.unwanted = false;
  if (!guess) return;
  entry.guess_bytes = load_bytes(entry);
  guessed_bytes_[entry.source.device] += entry.guess_bytes;
}

Commands Engine::allocated(StorageId storage, const StorageRef& restored, StreamRef stream) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry == nullptr || entry->restored != Restored::kAllocating) return commands;
  if (entry->dying) {
    finish_load(*entry, false, commands);
    return commands;
  }
  if (restored.nbytes < entry->restored_valid.span().end) {
    throw Error(ErrorKind::kUsage, "[Engine.allocated] storage " + std::to_string(value(storage)) + ": got " +
                                       format_bytes(restored.nbytes) + ", asked for " +
                                       format_bytes(entry->restored_valid.span().end) + ": allocate what kLoad says");
  }
  hold_restored(*entry, false);
  registry_.bind_restored(*entry, restored);
  hold_restored(*entry, true);
  entry->restored = Restored::kLoading;
  entry->restored_epoch = EpochId{last_epoch_};
  entry->load = CopyId{++last_copy_};
  copies_[entry->load] = {storage, true};
  load_changed_.notify_all();
  std::vector<EventId> after;
  if (value(stream) != 0) {
    const EventId event{++last_event_};
    after.push_back(event);
    commands.push_back({.kind = CommandKind::kRecord, .storage = storage, .event = event, .stream = stream});
  }
  commands.push_back({.kind = CommandKind::kCopy,
                      .storage = storage,
                      .copy = entry->load,
                      .to_device = true,
                      .after = std::move(after),
                      .plan = plan_restore(entry->to_load(), {Tier::kDevice, restored.address, 0})});
  return commands;
}

Commands Engine::allocation_failed(StorageId storage) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry == nullptr || entry->restored != Restored::kAllocating) return commands;
  const bool guess = entry->guess_bytes > 0;
  finish_load(*entry, false, commands);
  if (!guess) release_unclaimed(commands);
  return commands;
}

void Engine::finish_load(Entry& entry, bool ok, Commands& commands) {
  if (ok) {
    entry.restored = Restored::kReady;
    stats_.h2d_copies += entry.to_load().size();
    stats_.h2d_bytes += entry.restored_valid.nbytes();
    if (entry.unwanted || value(entry.pass) == 0 || entry.unserved == 0) release_restored(entry, commands);
  } else {
    registry_.unbind_restored(entry);
    entry.restored = Restored::kNone;
    release_restored(entry, commands);
  }
  load_changed_.notify_all();
  if (entry.dying) finish_entry(entry, commands);
}

bool Engine::wait_allocated(StorageId storage, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return load_changed_.wait_for(lock, limit, [&] {
    const Entry* entry = registry_.find(storage);
    return entry == nullptr || entry->restored != Restored::kAllocating;
  });
}

void Engine::wait_loaded(StorageId storage) {
  std::unique_lock lock(mutex_);
  load_changed_.wait(lock, [&] {
    const Entry* entry = registry_.find(storage);
    return entry == nullptr || !entry->loading();
  });
}

void Engine::prefetch(const Entry& after, PassId pass, Commands& commands) {
  if (guessed_bytes_[after.source.device] >= config_.prefetch_bytes) return;
  int steps = kPrefetchSteps;
  registry_.walk_back(after.id, [&](Entry& entry) {
    if (--steps < 0) return false;
    const bool served = entry.pass == pass && entry.unserved == 0;
    const bool needs_load = !entry.leased() && !entry.valid.empty() && !entry.restored_held && !entry.loading();
    // Somebody may hold what this pass was given before: its other views must be views of that.
    const bool given = entry.pass == pass && entry.restored == Restored::kReady;
    if (entry.epoch != after.epoch || entry.dying || served || given || !needs_load) return true;
    // In order of need: what does not fit is not overtaken by an older one of the same device.
    const DeviceId device = entry.source.device;
    if (guessed_bytes_[device] + load_bytes(entry) > config_.prefetch_bytes) return device != after.source.device;
    begin_claims(entry, pass);
    begin_load(entry, true);
    commands.push_back({.kind = CommandKind::kAlloc,
                        .storage = entry.id,
                        .nbytes = load_bytes(entry),
                        .residue = load_residue(entry)});
    return true;
  });
}

void Engine::no_longer_guess(Entry& entry) {
  guessed_bytes_[entry.source.device] -= entry.guess_bytes;
  entry.guess_bytes = 0;
}

void Engine::release_restored(Entry& entry, Commands& commands) {
  no_longer_guess(entry);
  if (!entry.restored_held) return;
  hold_restored(entry, false);
  commands.push_back({.kind = CommandKind::kReleaseRestored, .storage = entry.id, .copy = entry.load});
}

void Engine::release_unclaimed(Commands& commands) {
  registry_.for_each([&](Entry& entry) {
    if (entry.restored == Restored::kReady) release_restored(entry, commands);
    if (entry.guess_bytes == 0 || entry.restored != Restored::kLoading) return;
    entry.unwanted = true;
    commands.push_back({.kind = CommandKind::kWait, .storage = entry.id, .copy = entry.load});
  });
}

Commands Engine::end_pass(PassId pass) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  registry_.for_each([&](Entry& entry) {
    if (entry.pass != pass) return;
    entry.pass = PassId{};
    entry.unserved = 0;
    if (entry.restored == Restored::kReady) release_restored(entry, commands);
  });
  return commands;
}

}  // namespace ebbtide
