// Room outside the device: blocks of the space, what is moved on into the backing to make room, and who waits for it.
#include <algorithm>
#include <functional>
#include <utility>

#include "ebbtide/engine.h"

namespace ebbtide {

namespace {

// A backing that has refused so many parcels is full.
constexpr int kRefusals = 8;

}  // namespace

std::optional<Block> Engine::take_block(std::uint64_t nbytes) {
  // What others have made the space reserve is no room of this engine's.
  if (nbytes > config_.max_tier_bytes || stats_.tier_bytes > config_.max_tier_bytes - nbytes) return std::nullopt;
  std::optional<Block> block = space_->allocate(nbytes, config_.max_tier_bytes);
  if (block) {
    stats_.tier_bytes += nbytes;
    stats_.peak_tier_bytes = std::max(stats_.peak_tier_bytes, stats_.tier_bytes);
  }
  return block;
}

void Engine::give_block(Parcel& parcel) {
  space_->free(parcel.block);
  stats_.tier_bytes -= parcel.block.nbytes;
  parcel.block = {};
  room_changed_ = true;
}

void Engine::give_backing(Parcel& parcel) {
  backing_->free(parcel.backing);
  stats_.backing_bytes -= parcel.backing.nbytes;
  parcel.backing = {};
}

bool Engine::make_room(std::uint64_t nbytes, Commands& commands) {
  if (growing_) return true;
  const std::uint64_t growth = growth_refused_ ? 0 : space_->growth(nbytes, config_.max_tier_bytes);
  if (growth > 0) {
    growing_ = true;
    commands.push_back({.kind = CommandKind::kGrow, .nbytes = growth});
    return true;
  }
  if (backing_ == nullptr) return false;
  spill_while([&] { return spilling_bytes_ < nbytes; }, commands);
  // Whatever is running leaves a parcel that can be moved on afterwards.
  return !copies_.empty();
}

Commands Engine::grown(bool ok) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  growing_ = false;
  growth_refused_ = !ok;
  load_changed_.notify_all();
  room_changed_ = true;
  retry_waiting(commands);
  return commands;
}

void Engine::spill_ahead(Commands& commands) {
  if (backing_ == nullptr) return;
  const std::uint64_t full = config_.max_tier_bytes / 4 * 3;
  spill_while([&] { return stats_.tier_bytes - spilling_bytes_ > full; }, commands);
}

// Moves idle parcels on, oldest first.
void Engine::spill_while(const std::function<bool()>& more, Commands& commands) {
  if (backing_failed_) return;
  int refused = 0;
  for (auto it = spillable_.begin(); it != spillable_.end() && more();) {
    Parcel& parcel = parcels_.at(*it);
    ++spill_looks_;
    if (!parcel.spillable()) {
      it = spillable_.erase(it);  // once it is idle, it comes back
    } else if (spill(parcel, commands)) {
      it = spillable_.erase(it);
    } else if (++refused == kRefusals) {
      return;
    } else {
      ++it;
    }
  }
}

// Whether there was room behind.
bool Engine::spill(Parcel& parcel, Commands& commands) {
  const std::optional<Block> backing = backing_->allocate(parcel.nbytes, config_.max_backing_bytes);
  backing_full_ = !backing;
  if (!backing) return false;
  stats_.backing_bytes += backing->nbytes;
  stats_.peak_backing_bytes = std::max(stats_.peak_backing_bytes, stats_.backing_bytes);
  parcel.backing = *backing;
  parcel.moving = CopyId{++last_copy_};
  spilling_bytes_ += parcel.nbytes;
  move(parcel, Hop::kSpill, commands);
  return true;
}

void Engine::move(const Parcel& parcel, Hop hop, Commands& commands) {
  const Place& src = hop == Hop::kSpill ? parcel.block.place : parcel.backing.place;
  const Place& dst = hop == Hop::kSpill ? parcel.backing.place : parcel.block.place;
  const std::vector<StorageId> storages = {parcel.members.front()};
  copies_[parcel.moving] = {
      .hop = hop, .device = {}, .moved = {{storages.front(), parcel.nbytes, 0}}, .parcel = parcel.id};
  commands.push_back({.kind = CommandKind::kCopy,
                      .storage = storages.front(),
                      .copy = parcel.moving,
                      .hop = hop,
                      .storages = storages,
                      .plan = {{src, dst, parcel.nbytes}}});
}

void Engine::finish_move(Hop hop, ParcelId id, bool ok, Commands& commands) {
  Parcel& parcel = parcels_.at(id);
  const CopyId copy = std::exchange(parcel.moving, {});
  if (hop == Hop::kSpill) {
    spilling_bytes_ -= parcel.nbytes;
    if (ok) {
      stats_.spilled_bytes += parcel.nbytes;
    } else {
      backing_failed_ = true;
      give_backing(parcel);
    }
    room_changed_ = true;
    tidy(id);
    return;
  }
  parcel.fetching = false;
  if (!ok) give_block(parcel);
  std::vector<CopyId> waiting;
  for (const auto& [load, of] : loads_) {
    if (std::ranges::find(of.reading, id) != of.reading.end()) waiting.push_back(load);
  }
  for (const CopyId load : waiting) {
    if (ok) {
      start_load(load, commands);
    } else {
      fail_load(load, copy, 0, commands);
    }
  }
  tidy(id);
}

void Engine::leave_parcel(const Entry& entry, ParcelId id) {
  const auto found = parcels_.find(id);
  if (found == parcels_.end()) return;
  std::erase(found->second.members, entry.id);
  tidy(id);
}

// Gives back what the parcel does not need any more.
void Engine::tidy(ParcelId id) {
  const auto found = parcels_.find(id);
  if (found == parcels_.end() || !found->second.idle()) return;
  Parcel& parcel = found->second;
  const bool unused = parcel.members.empty();
  if (parcel.block.nbytes > 0 && (unused || parcel.backing.nbytes > 0)) give_block(parcel);
  if (!unused) {
    if (backing_ != nullptr && parcel.spillable()) spillable_.insert(id);
    return;
  }
  if (parcel.backing.nbytes > 0) give_backing(parcel);
  spillable_.erase(id);
  parcels_.erase(found);
}

void Engine::retry_waiting(Commands& commands) {
  while (std::exchange(room_changed_, false)) {
    for (std::size_t n = waiting_loads_.size(); n > 0; --n) {
      const CopyId load = waiting_loads_.front();
      waiting_loads_.pop_front();
      start_load(load, commands);
    }
    for (std::size_t n = waiting_offloads_.size(); n > 0; --n) {
      std::vector<Entry*> entries;
      for (const StorageId id : waiting_offloads_.front()) {
        Entry* entry = registry_.find(id);
        if (entry != nullptr && entry->lease == Lease::kRoom) entries.push_back(entry);
      }
      waiting_offloads_.pop_front();
      offload(entries, commands);
    }
  }
}

}  // namespace ebbtide
