// Restoring: where a ticket's bytes are now, and what is loaded ahead of being asked for.
#include "ebbtide/engine.h"
#include "ebbtide/error.h"

namespace ebbtide {

namespace {

// How far back a guess looks past entries that need no load.
constexpr int kPrefetchSteps = 64;

std::uint64_t load_bytes(const Entry& entry) { return entry.valid.span().end; }

std::uint64_t load_residue(const Entry& entry) { return entry.source.address % kAlignmentBytes; }

bool loading(const Entry& entry) {
  return entry.restored == Restored::kAllocating || entry.restored == Restored::kLoading;
}

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
  } else if (loading(entry)) {
    verdict.outcome = RestoreOutcome::kPending;
    verdict.load = entry.load;
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
    if (entry.restored_held) release_restored(entry, verdict.commands);
    begin_load(entry, false);
  } else {
    throw Error(ErrorKind::kDevice, "[Engine.restore] storage " + std::to_string(value(entry.id)) + ": " +
                                        format_bytes(range.nbytes()) +
                                        " are neither on the device nor in a tier: run the forward again");
  }
  claim(entry, *record, pass);
  if (value(pass) != 0) prefetch(entry, pass, verdict.commands);
  if (entry.unserved == 0 && entry.restored_held && entry.restored == Restored::kReady) {
    release_restored(entry, verdict.commands);
  }
  return verdict;
}

void Engine::claim(Entry& entry, TicketRecord& ticket, PassId pass) {
  if (value(pass) == 0) return;
  if (entry.pass != pass) {
    entry.pass = pass;
    entry.unserved = entry.live_tickets;
  }
  if (ticket.served == pass) return;
  ticket.served = pass;
  if (entry.unserved > 0) --entry.unserved;
}

void Engine::begin_load(Entry& entry, bool guess) {
  registry_.unbind_restored(entry);
  entry.restored = Restored::kAllocating;
  entry.restored_valid.clear();
  entry.load = CopyId{};
  entry.guess_bytes = guess ? load_bytes(entry) : 0;
  guessed_bytes_ += entry.guess_bytes;
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
  registry_.bind_restored(*entry, restored);
  hold_restored(*entry, true);
  entry->restored = Restored::kLoading;
  entry->restored_stream = stream;
  entry->restored_valid = entry->valid;
  entry->load = CopyId{++last_copy_};
  copies_[entry->load] = {storage, true};
  EventId event{};
  if (value(stream) != 0) {
    event = EventId{++last_event_};
    commands.push_back({.kind = CommandKind::kRecord, .event = event, .stream = stream});
  }
  commands.push_back({.kind = CommandKind::kCopy,
                      .storage = storage,
                      .copy = entry->load,
                      .to_device = true,
                      .event = event,
                      .plan = plan_restore(entry->copied, {Tier::kDevice, restored.address, 0})});
  return commands;
}

Commands Engine::allocation_failed(StorageId storage) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry != nullptr && entry->restored == Restored::kAllocating) finish_load(*entry, false, commands);
  release_guesses(commands);
  return commands;
}

void Engine::finish_load(Entry& entry, bool ok, Commands& commands) {
  if (ok) {
    entry.restored = Restored::kReady;
    stats_.h2d_copies += entry.copied.size();
    stats_.h2d_bytes += entry.restored_valid.nbytes();
    if (value(entry.pass) == 0 || entry.unserved == 0) release_restored(entry, commands);
  } else {
    registry_.unbind_restored(entry);
    entry.restored = Restored::kNone;
    if (entry.restored_held) release_restored(entry, commands);
    no_longer_guess(entry);
  }
  load_changed_.notify_all();
  if (entry.dying) finish_entry(entry, commands);
}

void Engine::wait_loaded(StorageId storage) {
  std::unique_lock lock(mutex_);
  load_changed_.wait(lock, [&] {
    const Entry* entry = registry_.find(storage);
    return entry == nullptr || !loading(*entry);
  });
}

void Engine::prefetch(const Entry& after, PassId pass, Commands& commands) {
  if (guessed_bytes_ >= config_.prefetch_bytes) return;
  int steps = kPrefetchSteps;
  registry_.walk_back(after.id, [&](Entry& entry) {
    if (--steps < 0) return false;
    const bool served = entry.pass == pass && entry.unserved == 0;
    const bool needs_load = !entry.leased() && !entry.restored_held && !loading(entry);
    if (entry.epoch != after.epoch || entry.dying || served || !needs_load) return true;
    if (guessed_bytes_ + load_bytes(entry) > config_.prefetch_bytes) return false;
    if (entry.pass != pass) {
      entry.pass = pass;
      entry.unserved = entry.live_tickets;
    }
    begin_load(entry, true);
    commands.push_back({.kind = CommandKind::kAlloc,
                        .storage = entry.id,
                        .nbytes = load_bytes(entry),
                        .residue = load_residue(entry)});
    return true;
  });
}

void Engine::no_longer_guess(Entry& entry) {
  guessed_bytes_ -= entry.guess_bytes;
  entry.guess_bytes = 0;
}

void Engine::release_restored(Entry& entry, Commands& commands) {
  no_longer_guess(entry);
  if (!entry.restored_held) return;
  hold_restored(entry, false);
  commands.push_back({.kind = CommandKind::kReleaseRestored, .storage = entry.id});
}

void Engine::release_guesses(Commands& commands) {
  registry_.for_each([&](Entry& entry) {
    if (entry.guess_bytes > 0 && entry.restored == Restored::kReady) {
      release_restored(entry, commands);
      registry_.unbind_restored(entry);
      entry.restored = Restored::kNone;
    }
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
