// Offloading: when a storage that left the window is copied, and when its memory is let go.
#include "ebbtide/engine.h"

namespace ebbtide {

void Engine::look(Commands& commands, std::size_t parked) {
  for (auto& [device, window] : windows_) {
    // At once, however many are parked: most storages are free when they leave the window.
    while (const std::optional<StorageId> left = window.pop_over(config_.keep_last_bytes)) {
      probe(*registry_.find(*left), commands);
    }
  }
  while (parked > 0 && !due_.empty()) {
    Entry* entry = registry_.find(due_.front());
    due_.pop_front();
    if (entry == nullptr || entry->lease != Lease::kDue) continue;
    probe(*entry, commands);
    --parked;
  }
}

void Engine::probe(Entry& entry, Commands& commands) {
  set_lease(entry, Lease::kProbing);
  commands.push_back({.kind = CommandKind::kProbe, .storage = entry.id});
}

Commands Engine::probed(StorageId storage, const ProbeAnswer& answer) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  Entry* entry = registry_.find(storage);
  if (entry == nullptr || entry->lease != Lease::kProbing) return commands;
  if (!answer.same || !answer.intact) {
    leave_changed(*entry, answer, commands);
  } else if (held_by_others(*entry, answer)) {
    set_found_held(*entry, true);
    set_lease(*entry, Lease::kDue);
    due_.push_back(storage);
  } else {
    set_found_held(*entry, false);
    start_offload(*entry, commands);
  }
  return commands;
}

void Engine::start_offload(Entry& entry, Commands& commands) {
  const ByteRanges missing = entry.missing();
  const std::optional<Block> block = take_block(missing.nbytes());
  if (!block) {
    keep_on_device(entry, commands);
    return;
  }
  const Place source{Tier::kDevice, entry.source.address, 0};
  const CopyId copy{++last_copy_};
  entry.offload = copy;
  entry.copying = missing;
  entry.copying_block = *block;
  set_lease(entry, Lease::kInFlight);
  in_flight_bytes_ += entry.source.nbytes;
  copies_[copy] = {entry.id, false};
  Command command{.kind = CommandKind::kCopy,
                  .storage = entry.id,
                  .copy = copy,
                  .plan = plan_offload(source, missing, block->place)};
  for (const SavedEvent& saved : entry.events) command.after.push_back(saved.event);
  entry.events.clear();
  commands.push_back(std::move(command));
  bound_in_flight(commands);
}

void Engine::bound_in_flight(Commands& commands) {
  std::uint64_t in_flight = in_flight_bytes_;
  for (const auto& [copy, running] : copies_) {
    if (in_flight <= config_.in_flight_bytes) return;
    if (running.to_device) continue;
    commands.push_back({.kind = CommandKind::kWait, .storage = running.storage, .copy = copy});
    in_flight -= registry_.find(running.storage)->source.nbytes;
  }
}

Commands Engine::completed(CopyId copy, bool ok, const ProbeAnswer& answer) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  const auto found = copies_.find(copy);
  if (found == copies_.end()) return commands;
  const RunningCopy running = found->second;
  copies_.erase(found);
  Entry& entry = *registry_.find(running.storage);
  if (running.to_device) {
    finish_load(entry, ok, commands);
  } else {
    finish_offload(entry, ok, answer, commands);
  }
  return commands;
}

void Engine::finish_offload(Entry& entry, bool ok, const ProbeAnswer& answer, Commands& commands) {
  in_flight_bytes_ -= entry.source.nbytes;
  const ByteRanges copied = entry.copying;
  const Block block = entry.copying_block;
  entry.copying.clear();
  entry.copying_block = {};
  set_lease(entry, Lease::kDue);

  if (!ok || !answer.same || !answer.intact) {
    give_block(block);
    if (!answer.same || !answer.intact) {
      leave_changed(entry, answer, commands);
    } else if (entry.dying) {
      pin(entry);
    } else {
      keep_on_device(entry, commands);
    }
  } else {
    for (const CopiedSpan& span : copied_spans(copied, block.place)) entry.copied.push_back(span);
    entry.valid.add(copied);
    entry.blocks.push_back(block);
    stats_.d2h_copies += copied.ranges().size();
    stats_.d2h_bytes += copied.nbytes();
    if (block.place.tier == Tier::kFile) stats_.spilled_bytes += copied.nbytes();
    if (entry.missing().empty()) {
      (held_by_others(entry, answer) ? stats_.unfreed_bytes : stats_.freed_bytes) += entry.source.nbytes;
      release_lease(entry, commands);
    } else {
      due_.push_back(entry.id);
    }
  }
  if (entry.dying) finish_entry(entry, commands);
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
  stats_.keep(KeepReason::kTierFull);
  if (told_tier_full_) return;
  told_tier_full_ = true;
  commands.push_back({.kind = CommandKind::kTierFull, .storage = entry.id});
}

}  // namespace ebbtide
