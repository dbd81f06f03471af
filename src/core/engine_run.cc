// Runs: groups whose copies the caller starts.
#include <algorithm>
#include <ranges>

#include "ebbtide/engine.h"

namespace ebbtide {

RunId Engine::open_run(std::size_t label) {
  const std::lock_guard lock(mutex_);
  ++stats_of(label).runs;
  return RunId{++last_run_};
}

// What is saved in a run waits for it, unless it is on its way already.
void Engine::join_run(Entry& entry, const SaveRequest& request, bool is_new) {
  if (value(request.run) == 0) {
    entry.on_request = false;
    return;
  }
  Run& run = runs_[request.run];
  const bool on_request = request.on_request && !run.requested.contains(entry.source.identity);
  entry.on_request = on_request && (is_new || entry.on_request);
  if (run.members.insert(entry.id).second) entry.runs.push_back(request.run);
  if (entry.lease != Lease::kWindow && entry.lease != Lease::kDue) return;
  windows_[entry.source.device].remove(entry.id);
  set_found_held(entry, false);
  set_lease(entry, Lease::kScheduled);
}

void Engine::leave_runs(const Entry& entry) {
  for (const RunId run : entry.runs) {
    const auto found = runs_.find(run);
    if (found == runs_.end()) continue;
    found->second.members.erase(entry.id);
    if (found->second.members.empty() && found->second.requested.empty()) runs_.erase(found);
  }
}

std::vector<StorageId> Engine::members_of(RunId run) const {
  const auto found = runs_.find(run);
  if (found == runs_.end()) return {};
  return {found->second.members.begin(), found->second.members.end()};
}

void Engine::request(RunId run, std::uint64_t identity) {
  const std::lock_guard lock(mutex_);
  runs_[run].requested.insert(identity);
  for (const StorageId id : members_of(run)) {
    Entry& entry = *registry_.find(id);
    if (entry.source.identity == identity) entry.on_request = false;
  }
}

Commands Engine::offload_run(RunId run) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  for (const StorageId id : members_of(run)) {
    Entry& entry = *registry_.find(id);
    if (entry.runs.back() != run) continue;
    if (entry.lease == Lease::kScheduled && entry.on_request) {
      pin(entry);
      stats_.keep(KeepReason::kPolicy);
    } else if (entry.lease == Lease::kScheduled || entry.lease == Lease::kDue) {
      probe(entry, commands);
    }
  }
  if (config_.pack_below_bytes > 0) commands.push_back({.kind = CommandKind::kGather});
  return commands;
}

Commands Engine::let_go_run(RunId run) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  for (const StorageId id : members_of(run)) {
    Entry& entry = *registry_.find(id);
    if (entry.lease == Lease::kRoom && !copies_.empty()) {
      // There will be room when something that runs is done.
      const auto& [copy, running] = *copies_.begin();
      commands.push_back({.kind = CommandKind::kWait, .storage = running.moved.front().storage, .copy = copy});
    } else if (entry.lease == Lease::kInFlight && value(entry.stream) == 0) {
      commands.push_back({.kind = CommandKind::kWait, .storage = id, .copy = entry.offload});
    } else if (entry.lease == Lease::kInFlight && !entry.asked) {
      entry.asked = true;
      commands.push_back({.kind = CommandKind::kProbe, .storage = id});
    }
  }
  return commands;
}

// Not where this pass has been given it, or has no more use for it.
bool Engine::loads_with_run(const Entry& entry) {
  const bool free = !entry.leased() && !entry.restored_held && !entry.loading() && !entry.dying;
  const bool given = value(entry.pass) != 0 && (entry.unserved == 0 || entry.restored != Restored::kNone);
  return free && !given && !entry.runs.empty() && !entry.valid.empty();
}

Commands Engine::load_run(RunId run) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  for (const StorageId id : std::views::reverse(members_of(run))) {
    Entry& entry = *registry_.find(id);
    if (loads_with_run(entry)) static_cast<void>(begin_load(entry, PassId{}, LoadCause::kRun, commands));
  }
  return commands;
}

std::vector<std::pair<StorageId, CopyId>> Engine::loads_of(RunId run) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<StorageId, CopyId>> loads;
  for (const StorageId id : members_of(run)) {
    const Entry& entry = *registry_.find(id);
    if (entry.loading()) loads.emplace_back(id, entry.load);
  }
  return loads;
}

Commands Engine::order_after_run(RunId run, StreamRef stream) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  for (const StorageId id : members_of(run)) {
    Entry& entry = *registry_.find(id);
    if (entry.restored == Restored::kLoading) order_after_load(entry, stream, commands);
  }
  return commands;
}

Commands Engine::release_run(RunId run) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  release_loaded(run, commands);
  retry_waiting(commands);
  return commands;
}

void Engine::release_loaded(RunId run, Commands& commands) {
  for (const StorageId id : members_of(run)) {
    Entry& entry = *registry_.find(id);
    if (!entry.loaded_by_run) continue;
    // Without streams a load that runs is let go of when it is done.
    entry.unwanted = entry.loading();
    release_restored(entry, commands);
  }
}

Commands Engine::keep_run(RunId run) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  for (const StorageId id : members_of(run)) {
    Entry& entry = *registry_.find(id);
    if (entry.runs.back() == run && (entry.lease == Lease::kScheduled || entry.lease == Lease::kDue)) pin(entry);
  }
  release_loaded(run, commands);
  retry_waiting(commands);
  return commands;
}

Commands Engine::close_run(RunId run) {
  const std::lock_guard lock(mutex_);
  Commands commands;
  release_loaded(run, commands);
  for (const StorageId id : members_of(run)) std::erase(registry_.find(id)->runs, run);
  runs_.erase(run);
  retry_waiting(commands);
  return commands;
}

RunState Engine::run_state(RunId run) const {
  const std::lock_guard lock(mutex_);
  RunState state;
  for (const StorageId id : members_of(run)) {
    const Entry& entry = *registry_.find(id);
    if (entry.lease == Lease::kScheduled) {
      ++state.scheduled;
    } else if (entry.lease == Lease::kPinned) {
      ++state.staying;
    } else if (entry.leased()) {
      ++state.leaving;
    } else if (entry.loading()) {
      ++state.coming;
    } else {
      ++(entry.restored_held ? state.back : state.away);
    }
  }
  return state;
}

}  // namespace ebbtide
