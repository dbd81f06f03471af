// Saving: which entry a tensor belongs to, and which bytes of it are new.
#include <algorithm>

#include "ebbtide/engine.h"

namespace ebbtide {

namespace {

std::uint64_t view_bytes(const ViewMeta& view) {
  std::uint64_t nbytes = static_cast<std::uint64_t>(view.itemsize);
  for (const std::int64_t size : view.sizes) nbytes *= static_cast<std::uint64_t>(size);
  return nbytes;
}

bool same_memory(const StorageRef& a, const StorageRef& b) { return a.address == b.address && a.nbytes == b.nbytes; }

SaveVerdict keep_verdict(KeepReason reason) { return {.outcome = SaveOutcome::kKept, .reason = reason}; }

}  // namespace

SaveVerdict Engine::save(const SaveRequest& request) {
  const ByteRange range = extent(request.view);
  const std::lock_guard lock(mutex_);
  ++saves_;
  if (!request.spoiled) {
    ++stats_.saved_tensors;
    stats_.saved_bytes += view_bytes(request.view);
  }
  if (range.end > request.storage.nbytes) {
    stats_.keep(KeepReason::kUnsupported);
    return keep_verdict(KeepReason::kUnsupported);
  }
  if (!request.forced && request.storage.nbytes < config_.min_bytes) {
    stats_.keep(KeepReason::kSmall);
    return keep_verdict(KeepReason::kSmall);
  }

  SaveVerdict verdict;
  Entry* entry = find_join(request, range);
  if (entry == nullptr) {
    entry = &registry_.create(request.storage, request.version, request.epoch);
    entry->stream = request.stream;
    entry->label = request.label;
    entry->group = GroupId{last_group_};
    verdict.outcome = SaveOutcome::kNew;
    ++stats_.storages;
    ++stats_of(entry->label).storages;
  } else {
    verdict.outcome = SaveOutcome::kJoined;
    const auto equal = [&](const SavedView& view) { return view.extent == range && view.meta == request.view; };
    const auto found = std::find_if(entry->views.begin(), entry->views.end(), equal);
    if (found != entry->views.end()) {
      ++stats_.exact_duplicates;
      verdict.outcome = SaveOutcome::kDuplicate;
      verdict.storage = entry->id;
      verdict.ticket = issue(*entry, static_cast<std::uint32_t>(found - entry->views.begin()));
      follow(*entry, request, false, verdict.commands);
      join_run(*entry, request, false);
      look(verdict.commands, config_.keep_last_storages);
      look_at_parked(verdict.commands, config_.probes_per_save, false);
      return verdict;
    }
  }
  entry->views.push_back({request.view, range});
  verdict.storage = entry->id;
  verdict.ticket = issue(*entry, static_cast<std::uint32_t>(entry->views.size() - 1));
  want(*entry, range, request, verdict);
  join_run(*entry, request, verdict.outcome == SaveOutcome::kNew);
  look(verdict.commands, config_.keep_last_storages);
  look_at_parked(verdict.commands, config_.probes_per_save, false);
  return verdict;
}

Entry* Engine::find_join(const SaveRequest& request, ByteRange range) {
  if (Entry* entry = registry_.find_saved(request.storage.identity, request.epoch)) {
    const bool joins = !request.spoiled && !entry->closed && entry->version == request.version &&
                       same_memory(entry->source, request.storage);
    if (joins) return entry;
    entry->closed = true;
    return nullptr;
  }
  Entry* entry = registry_.find_restored(request.storage.identity);
  if (entry == nullptr) return nullptr;
  // Loaded before this epoch began, it may have been written to since in a way that no counter sees.
  const bool joins =
      !request.spoiled && entry->version == request.version && value(request.epoch) <= value(entry->restored_epoch) &&
      (entry->restored == Restored::kReady || (entry->restored == Restored::kLoading && value(request.stream) != 0)) &&
      same_memory(entry->restored_ref, request.storage) && entry->restored_valid.contains(range);
  return joins ? entry : nullptr;
}

TicketId Engine::issue(Entry& entry, std::uint32_t view) {
  const TicketId ticket = registry_.issue(entry, view);
  // Saved while a backward runs: it is for a later one, so this one has no claim to keep for it.
  registry_.ticket(ticket)->served = entry.pass;
  return ticket;
}

void Engine::want(Entry& entry, ByteRange range, const SaveRequest& request, SaveVerdict& verdict) {
  const std::uint64_t before = entry.wanted.nbytes();
  entry.wanted.add(range);
  const std::uint64_t added = entry.wanted.nbytes() - before;
  follow(entry, request, added > 0, verdict.commands);
  if (added == 0) return;
  stats_.unique_bytes += added;
  stats_of(entry.label).unique_bytes += added;
  Window& window = windows_[entry.source.device];
  if (entry.lease == Lease::kWindow) {
    window.grow(entry.id, added);
  } else if (entry.lease == Lease::kRetained) {
    set_lease(entry, Lease::kDue);
    due_.push_back(entry.id);
  } else if (!entry.leased()) {
    set_lease(entry, Lease::kWindow);
    window.push(entry.id, added, entry.group);
    verdict.lease = true;
  }
}

// Notes from where and when the storage was saved.
void Engine::follow(Entry& entry, const SaveRequest& request, bool new_bytes, Commands& commands) {
  const GroupId group{last_group_};
  if (entry.group != group && entry.lease == Lease::kWindow) windows_[entry.source.device].move_to(entry.id, group);
  registry_.renew(entry, group);
  if (const auto found = groups_in_epoch_.find(entry.epoch); found != groups_in_epoch_.end()) {
    entry.group_in_epoch = found->second;
  }
  if (request.storage.identity != entry.source.identity) return order_after_load(entry, request.stream, commands);
  if (value(request.stream) == 0 || (!new_bytes && request.stream == entry.stream)) return;
  const bool copied = !entry.leased() || entry.lease == Lease::kInFlight || entry.lease == Lease::kRetained;
  if (!new_bytes && copied) {
    // It is read on another stream than the first, and no copy comes after that.
    commands.push_back({.kind = CommandKind::kRecordStream, .storage = entry.id, .stream = request.stream});
    return;
  }
  // The copy, and with it the end of the lease, comes after.
  const EventId event{++last_event_};
  // A later event of the same stream covers an earlier one; events of two streams say nothing about each other.
  std::erase_if(entry.events, [&](const SavedEvent& saved) { return saved.stream == request.stream; });
  entry.events.push_back({request.stream, event});
  commands.push_back({.kind = CommandKind::kRecord, .storage = entry.id, .event = event, .stream = request.stream});
}

}  // namespace ebbtide
