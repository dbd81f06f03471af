#include "ebbtide/engine.h"

#include <algorithm>

#include "ebbtide/error.h"

namespace ebbtide {

Engine::Engine(const EngineConfig& config, std::shared_ptr<BlockSpace> space)
    : config_(config), space_(std::move(space)) {
  if (space_ == nullptr) throw Error(ErrorKind::kUsage, "[Engine] no tier was given: pass a HostPool or a SpillFile");
}

Engine::~Engine() {
  registry_.for_each([this](Entry& entry) {
    for (const Block& block : entry.blocks) space_->free(block);
    if (entry.copying_block.nbytes > 0) space_->free(entry.copying_block);
  });
}

EpochId Engine::begin_epoch() {
  const std::lock_guard lock(mutex_);
  return EpochId{++last_epoch_};
}

Commands Engine::end_epoch(EpochId epoch) {
  const std::lock_guard lock(mutex_);
  registry_.close_epoch(epoch);
  Commands commands;
  look(commands, due_.size());
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
  } else if (value(entry.pass) != 0 && unserved && entry.unserved > 0 && --entry.unserved == 0 &&
             entry.restored == Restored::kReady) {
    release_restored(entry, commands);
  }
  return commands;
}

Commands Engine::recover(const std::vector<CopyId>& running) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  std::vector<CopyId> lost;
  for (const auto& [copy, of] : copies_) {
    if (std::find(running.begin(), running.end(), copy) == running.end()) lost.push_back(copy);
  }
  for (const CopyId copy : lost) {
    const RunningCopy of = copies_.at(copy);
    copies_.erase(copy);
    Entry& entry = *registry_.find(of.storage);
    if (of.to_device) {
      finish_load(entry, false, commands);
    } else {
      finish_offload(entry, true, {.same = false}, commands);
    }
  }
  std::vector<StorageId> allocating;
  registry_.for_each([&](Entry& entry) {
    if (entry.restored == Restored::kAllocating) allocating.push_back(entry.id);
    if (entry.lease != Lease::kProbing) return;
    set_lease(entry, Lease::kDue);
    due_.push_back(entry.id);
  });
  for (const StorageId storage : allocating) finish_load(*registry_.find(storage), false, commands);
  return commands;
}

bool Engine::knows(StorageId storage) const {
  const std::lock_guard lock(mutex_);
  return registry_.contains(storage);
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

void Engine::reset_stats() {
  const std::lock_guard lock(mutex_);
  stats_.reset();
}

void Engine::set_lease(Entry& entry, Lease lease) {
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
}

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
  const bool copying = entry.lease == Lease::kInFlight;
  if (entry.leased() && !copying) {
    if (windows_[entry.source.device].remove(entry.id)) stats_.keep(KeepReason::kLast);
    set_found_held(entry, false);
    release_lease(entry, commands);
  }
  if (entry.loading()) return;
  release_restored(entry, commands);
  if (copying) return;

  for (const Block& block : entry.blocks) give_block(block);
  commands.push_back({.kind = CommandKind::kForget, .storage = entry.id});
  registry_.erase(entry.id);
}

std::optional<Block> Engine::take_block(std::uint64_t nbytes) {
  std::optional<Block> block = space_->allocate(nbytes, config_.max_tier_bytes);
  if (block) {
    stats_.tier_bytes += nbytes;
    stats_.peak_tier_bytes = std::max(stats_.peak_tier_bytes, stats_.tier_bytes);
  }
  return block;
}

void Engine::give_block(const Block& block) {
  space_->free(block);
  stats_.tier_bytes -= block.nbytes;
}

}  // namespace ebbtide
