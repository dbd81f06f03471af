// Restoring: where a ticket's bytes are now, and what is loaded ahead of being asked for.
#include <algorithm>
#include <limits>

#include "ebbtide/engine.h"
#include "ebbtide/error.h"

namespace ebbtide {

namespace {

// As many as one operation may well have saved.
constexpr std::size_t kGivenOut = 8;

}  // namespace

RestoreVerdict Engine::restore(TicketId ticket, PassId pass, bool live, bool shared, StreamRef stream) {
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
  const bool has_streams = value(stream) != 0;
  // In device order a load is as good as done once it was started.
  const bool usable = entry.restored == Restored::kReady || (has_streams && entry.restored == Restored::kLoading);
  if (live) {
    verdict.outcome = RestoreOutcome::kLive;
    ++stats_.live_hits;
    give_saved(entry, verdict.commands);
  } else if (shared && usable && entry.restored_valid.contains(range)) {
    verdict.outcome = RestoreOutcome::kShared;
    verdict.load = entry.load;
    if (entry.guess_bytes > 0) ++stats_.prefetch_hits;
    no_longer_guess(entry);
    order_after_load(entry, stream, verdict.commands);
  } else if (entry.loading() && (!usable || entry.restored_held)) {
    verdict.outcome = RestoreOutcome::kPending;
    verdict.load = entry.load;
    const auto load = loads_.find(entry.load);
    verdict.allocating = load != loads_.end() && load->second.allocating > 0;
    entry.unwanted = false;
    // A guess of a pass that is over: from now on it is for this one, and is kept when it arrives.
    if (value(pass) != 0) begin_claims(entry, pass);
    return verdict;
  } else if (entry.valid.contains(range)) {
    verdict.outcome = RestoreOutcome::kLoad;
    verdict.residue = entry.source.address % kAlignmentBytes;
    verdict.stream = entry.stream;
    ++stats_.prefetch_misses;
    ++stats_of(entry.label).prefetch_misses;
    claim(entry, *record, pass);
    verdict.load = begin_load(entry, pass, LoadCause::kAsked, verdict.commands).copy;
    verdict.nbytes = entry.restored_valid.span().end;
    entry.asked_on = stream;
  } else {
    throw Error(ErrorKind::kDevice, "[Engine.restore] storage " + std::to_string(value(entry.id)) + ": " +
                                        format_bytes(range.nbytes()) +
                                        " are neither on the device nor in a tier: run the forward again");
  }
  claim(entry, *record, pass);
  if (entry.unserved == 0) give_out(entry, pass, verdict.commands);
  if (value(pass) != 0) prefetch(entry, pass, verdict.commands);
  return verdict;
}

// Everybody has asked for the storage: whoever got it holds it.
void Engine::give_out(Entry& entry, PassId pass, Commands& commands) {
  const std::uint64_t before = stats_.device_bytes;
  release_restored(entry, commands);
  if (value(pass) != 0 && entry.lease == Lease::kRetained) release_lease(entry, commands);
  if (stats_.device_bytes == before) return;
  given_out_.emplace_back(entry.id, before - stats_.device_bytes);
  if (given_out_.size() > kGivenOut) given_out_.pop_front();
}

// Of what was given out last: until its tickets are dropped, the operation that asked for it has not been issued.
std::uint64_t Engine::given_out_bytes() {
  std::uint64_t nbytes = 0;
  for (const auto& [id, given] : given_out_) {
    const Entry* entry = registry_.find(id);
    if (entry != nullptr && !entry->leased() && !entry->restored_held) nbytes += given;
  }
  return nbytes;
}

// Whoever is given the saved storage may resize or write it.
void Engine::give_saved(Entry& entry, Commands& commands) {
  prepare_for_writes(entry, commands);
  const auto leases = leases_.find(entry.source.identity);
  if (leases == leases_.end() || leases->second == (entry.leased() ? 1u : 0u)) return;
  // Other forwards have saved it too.
  registry_.for_each([&](Entry& other) {
    if (other.id != entry.id && other.source.identity == entry.source.identity) prepare_for_writes(other, commands);
  });
}

void Engine::prepare_for_writes(Entry& entry, Commands& commands) {
  if (entry.lease == Lease::kInFlight && value(entry.stream) == 0) {
    // Not under a copy that reads it.
    commands.push_back({.kind = CommandKind::kWait, .storage = entry.id, .copy = entry.offload});
  } else if (entry.lease == Lease::kInFlight) {
    // Waiting would hold up the device for bytes that are probably not needed any more: the copy is not used.
    entry.abandoned = true;
  } else if (entry.lease == Lease::kGathering || entry.lease == Lease::kRoom) {
    std::erase(gathering_, entry.id);
    for (std::vector<StorageId>& waiting : waiting_offloads_) std::erase(waiting, entry.id);
    set_lease(entry, Lease::kDue);
    due_.push_back(entry.id);
  }
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

// Said to everyone who uses the storage: another thread may have been told the same and not have come to it.
void Engine::order_after_load(Entry& entry, StreamRef stream, Commands& commands) {
  if (value(stream) == 0) return;
  const auto said = [&](const Command& command) {
    return command.kind == CommandKind::kWait && command.copy == entry.load && command.stream == stream;
  };
  if (entry.restored == Restored::kLoading && std::ranges::none_of(commands, said)) {
    commands.push_back({.kind = CommandKind::kWait, .storage = entry.id, .copy = entry.load, .stream = stream});
  }
  if (stream == entry.restored_stream) return;
  commands.push_back({.kind = CommandKind::kRecordStream, .storage = entry.id, .copy = entry.load, .stream = stream});
}

// Whether a backward has begun that is about to ask for the storage.
bool Engine::awaited(const Entry& entry) const {
  for (auto it = backwards_.lower_bound({entry.epoch, PassId{}}); it != backwards_.end(); ++it) {
    const auto& [epoch, pass] = it->first;
    if (epoch != entry.epoch) break;
    if (entry.need <= it->second && (entry.pass != pass || entry.unserved > 0)) return true;
  }
  return false;
}

// Where room for copies is left; returns whether it is.
bool Engine::retain(Entry& entry) {
  if (in_flight_bytes_ + entry.source.nbytes > config_.in_flight_bytes || !awaited(entry)) return false;
  const auto retained = [this](StorageId id) {
    const Entry* found = registry_.find(id);
    return found != nullptr && found->lease == Lease::kRetained;
  };
  while (!retained_.empty() && !retained(retained_.front())) retained_.pop_front();
  set_lease(entry, Lease::kRetained);
  retained_.push_back(entry.id);
  return true;
}

void Engine::let_go_of_retained(Entry& entry, Commands& commands) {
  stats_.freed_bytes += entry.source.nbytes;
  release_lease(entry, commands);
}

// Lets go of retained storages, of those needed last first.
void Engine::release_retained(std::uint64_t least_bytes, Commands& commands) {
  for (std::uint64_t released = 0; released < least_bytes && !retained_.empty(); retained_.pop_front()) {
    Entry* entry = registry_.find(retained_.front());
    if (entry == nullptr || entry->lease != Lease::kRetained) continue;
    released += entry->source.nbytes;
    let_go_of_retained(*entry, commands);
  }
}

void Engine::prefetch(const Entry& after, PassId pass, Commands& commands) {
  const auto [backward, first] = backwards_.try_emplace({after.epoch, pass}, after.need);
  backward->second = std::min(backward->second, after.need);
  const bool by_groups = config_.prefetch_groups && after.group_in_epoch > 0;
  const std::uint64_t in_use = given_out_bytes();
  std::uint64_t ahead = after.restored == Restored::kAllocating ? after.restored_valid.span().end : 0;
  for (const auto& [device, window] : windows_) {
    bool hole = false;
    // A group may be asked for from its middle on.
    const std::uint64_t begin = by_groups ? std::numeric_limits<std::uint64_t>::max() : after.need;
    const auto [found, fresh] = guessed_to_.try_emplace({pass, after.epoch, device}, begin);
    std::uint64_t& reached = found->second;
    reached = std::min(reached, begin);
    registry_.walk_back(reached, [&](Entry& entry) {
      const bool later = by_groups && entry.group_in_epoch > after.group_in_epoch;
      if (entry.epoch == after.epoch && entry.source.device == device && !later && entry.runs.empty()) {
        if (left_over(entry)) begin_claims(entry, pass);
        if (wants_load(entry, pass)) {
          // In order of need: what does not fit is not overtaken by an older one.
          const std::uint64_t nbytes = entry.valid.span().end;
          const auto may = [&] {
            if (!config_.prefetch_groups && !config_.prefetch_to_peak) return may_guess(device, nbytes);
            const bool near = by_groups ? entry.group_in_epoch + *config_.prefetch_groups >= after.group_in_epoch
                                        : guessed_bytes_[device] == 0 && config_.prefetch_bytes > 0;
            const std::uint64_t most =
                by_groups ? peak_held_bytes_ : std::max(peak_held_bytes_, config_.prefetch_bytes);
            return near || held_bytes() + in_use + ahead + nbytes <= most;
          };
          if (!may()) {
            if (by_groups) return false;
            release_left_over(commands);
            if (!may()) return false;
          }
          ahead += nbytes;
          begin_claims(entry, pass);
          static_cast<void>(begin_load(entry, pass, LoadCause::kGuess, commands));
        }
        // Its copy is still on the way: by the next time it may have to be loaded.
        hole |= entry.lease == Lease::kInFlight || entry.lease == Lease::kRoom || entry.lease == Lease::kGathering;
      }
      if (!hole) reached = entry.need;
      return true;
    });
  }
}

bool Engine::may_guess(DeviceId device, std::uint64_t nbytes) {
  const std::uint64_t guessed = guessed_bytes_[device];
  if (guessed == 0) return config_.prefetch_bytes > 0;
  return guessed + nbytes <= config_.prefetch_bytes;
}

// Loaded on a guess by a backward that is over. Where several forwards ran in one context, the next may need it.
bool Engine::left_over(const Entry& entry) {
  return value(entry.pass) == 0 && entry.guess_bytes > 0 && !entry.unwanted;
}

void Engine::release_left_over(Commands& commands) {
  registry_.for_each([&](Entry& entry) {
    if (left_over(entry) && !entry.loaded_by_run) release_restored(entry, commands);
  });
}

void Engine::no_longer_guess(Entry& entry) {
  if (!entry.loaded_by_run) guessed_bytes_[entry.source.device] -= entry.guess_bytes;
  entry.guess_bytes = 0;
  entry.loaded_by_run = false;
}

// Lets go of what was loaded, where that can be done in device order or the load is done.
void Engine::release_restored(Entry& entry, Commands& commands) {
  const bool started = entry.restored == Restored::kLoading && value(entry.restored_stream) != 0;
  if (entry.loading() && !started) return;
  no_longer_guess(entry);
  if (!entry.restored_held) return;
  // The memory goes back to the pool of this stream.
  if (started) order_after_load(entry, entry.restored_stream, commands);
  hold_restored(entry, false);
  commands.push_back({.kind = CommandKind::kReleaseRestored, .storage = entry.id, .copy = entry.load});
}

void Engine::release_unclaimed(Commands& commands) {
  fail_guesses(commands);
  backwards_.clear();  // until the next restore nothing is retained
  release_retained(std::numeric_limits<std::uint64_t>::max(), commands);
  registry_.for_each([&](Entry& entry) {
    release_restored(entry, commands);
    if (entry.guess_bytes > 0 && entry.restored == Restored::kLoading) {
      entry.unwanted = true;
      commands.push_back({.kind = CommandKind::kWait, .storage = entry.id, .copy = entry.load});
    }
    // Its memory is free once the copy is done.
    if (entry.lease == Lease::kInFlight && value(entry.stream) != 0) {
      commands.push_back({.kind = CommandKind::kWait, .storage = entry.id, .copy = entry.offload});
    }
  });
}

// Gives up loads that were not started and that nobody has asked for.
void Engine::fail_guesses(Commands& commands) {
  std::vector<CopyId> guesses;
  for (const auto& [copy, load] : loads_) {
    const auto guessed = [this](StorageId id) { return registry_.find(id)->guess_bytes > 0; };
    if (!load.started && std::ranges::all_of(load.members, guessed)) guesses.push_back(copy);
  }
  for (const CopyId copy : guesses) fail_load(copy, {}, 0, commands);
}

Commands Engine::end_pass(PassId pass) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  std::erase_if(guessed_to_, [pass](const auto& item) { return std::get<PassId>(item.first) == pass; });
  given_out_.clear();
  std::erase_if(backwards_, [pass](const auto& item) { return item.first.second == pass; });
  registry_.for_each([&](Entry& entry) {
    if (entry.lease == Lease::kRetained && !awaited(entry)) let_go_of_retained(entry, commands);
    if (entry.pass != pass) return;
    entry.pass = PassId{};
    entry.unserved = 0;
    const bool bounded = guessed_bytes_[entry.source.device] <= config_.prefetch_bytes;
    if (!left_over(entry) || !bounded) release_restored(entry, commands);
  });
  retry_waiting(commands);
  return commands;
}

}  // namespace ebbtide
