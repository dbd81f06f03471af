#include "engine_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ebbtide::testing {

namespace {

std::shared_ptr<FakeSpace> make_backing(const DriverOptions& options) {
  if (options.backing_capacity == 0) return nullptr;
  return std::make_shared<FakeSpace>(options.backing_capacity, Tier::kFile);
}

}  // namespace

Driver::Driver(const DriverOptions& options)
    : Driver(options, std::make_unique<FakeDevice>(options.device_capacity),
             std::make_shared<FakeSpace>(options.tier_capacity, options.tier)) {}

Driver::Driver(const DriverOptions& options, std::unique_ptr<Memory> memory, std::shared_ptr<FakeSpace> tier)
    : memory_(std::move(memory)),
      device(*memory_),
      space(std::move(tier)),
      backing(make_backing(options)),
      engine(options.config, space, backing),
      options_(options) {
  if (options.grows) space->start_empty();
}

EpochId Driver::begin_epoch() {
  const EpochId epoch = engine.begin_epoch();
  if (options_.record) journal.push_back({calls::BeginEpoch{}, std::to_string(value(epoch))});
  return epoch;
}

void Driver::end_epoch(EpochId epoch) { run(note(calls::EndEpoch{epoch}, engine.end_epoch(epoch))); }

void Driver::begin_group(EpochId epoch, std::size_t label) {
  run(note(calls::BeginGroup{epoch, label}, engine.begin_group(epoch, label)));
}

void Driver::end_group() { run(note(calls::EndGroup{}, engine.end_group())); }

Saved Driver::pack(Storage storage, const ViewMeta& view, EpochId epoch, StreamRef stream,
                   std::shared_ptr<Counter> counter, std::size_t label, SavedIn in) {
  Saved saved;
  saved.view = view;
  saved.counter = counter != nullptr ? std::move(counter) : storage->counter;
  saved.version = saved.counter->load();
  saved.bytes = device.read(*storage, extent(view), stream);
  const StorageRef ref = storage->ref;
  return save(std::move(storage), std::move(saved),
              {.storage = ref,
               .view = view,
               .version = saved.version,
               .epoch = epoch,
               .label = label,
               .run = in.run,
               .on_request = in.on_request,
               .stream = stream});
}

Saved Driver::save(Storage storage, Saved saved, SaveRequest request) {
  const SaveVerdict verdict = note(request, engine.save(request));
  saved.outcome = verdict.outcome;
  if (verdict.outcome == SaveOutcome::kKept) {
    saved.kept = std::move(storage);
    return saved;
  }
  saved.ticket = verdict.ticket;
  saved.storage = verdict.storage;
  bool spoiled = false;
  {
    const Lock lock(mutex_);
    Item& item = items_[verdict.storage];
    if (item.pinned.empty()) {
      item.ref = request.storage;
      item.source = storage;
      item.pinned.push_back(item.ref.identity);
      device.pin(item.ref.identity);
    }
    if (verdict.lease) {
      item.lease = storage;
      ++item.leases;
    }
    spoiled = !intact(item);
    const std::pair version(saved.counter, saved.version);
    if (!spoiled && std::ranges::find(item.versions, version) == item.versions.end()) item.versions.push_back(version);
  }
  if (!spoiled) storage.reset();
  run(verdict.commands);
  if (!spoiled) return saved;
  run(note(calls::Drop{verdict.ticket}, engine.drop(verdict.ticket)));
  request.spoiled = true;
  return save(std::move(storage), std::move(saved), request);
}

void Driver::drop(const Saved& saved) {
  if (saved.outcome != SaveOutcome::kKept) run(note(calls::Drop{saved.ticket}, engine.drop(saved.ticket)));
}

void Driver::end_pass(PassId pass) { run(note(calls::EndPass{pass}, engine.end_pass(pass))); }

RunId Driver::open_run(std::size_t label) {
  const RunId run = engine.open_run(label);
  if (options_.record) journal.push_back({calls::OpenRun{label}, std::to_string(value(run))});
  return run;
}

void Driver::request(RunId run, std::uint64_t identity) {
  engine.request(run, identity);
  if (options_.record) journal.push_back({calls::Request{run, identity}, ""});
}

void Driver::offload_run(RunId id) { run(note(calls::OffloadRun{id}, engine.offload_run(id))); }

void Driver::let_go_run(RunId id) { run(note(calls::LetGoRun{id}, engine.let_go_run(id))); }

void Driver::load_run(RunId id) { run(note(calls::LoadRun{id}, engine.load_run(id))); }

void Driver::order_after_run(RunId id, StreamRef stream) {
  run(note(calls::OrderAfterRun{id, stream}, engine.order_after_run(id, stream)));
}

void Driver::release_run(RunId id) { run(note(calls::ReleaseRun{id}, engine.release_run(id))); }

void Driver::keep_run(RunId id) { run(note(calls::KeepRun{id}, engine.keep_run(id))); }

void Driver::close_run(RunId id) { run(note(calls::CloseRun{id}, engine.close_run(id))); }

void Driver::recover() { run(engine.recover(held())); }

std::vector<CopyId> Driver::held(std::optional<Hop> hop) const {
  const Lock lock(mutex_);
  std::vector<CopyId> copies;
  for (const auto& [copy, command] : copies_) {
    if (!hop || command.hop == *hop) copies.push_back(copy);
  }
  return copies;
}

Command Driver::command(CopyId copy) const {
  const Lock lock(mutex_);
  return copies_.at(copy);
}

void Driver::complete_all() {
  for (std::vector<CopyId> copies = held(); !copies.empty(); copies = held()) complete(copies.front());
}

void Driver::lose_copies() {
  const Lock lock(mutex_);
  copies_.clear();
}

void Driver::fail_next_copies(int count, std::optional<Hop> hop) {
  failing_hop_ = hop;
  failing_ = count;
}

bool Driver::fails(Hop hop) {
  if (failing_ <= 0 || (failing_hop_ && *failing_hop_ != hop)) return false;
  --failing_;
  return true;
}

void Driver::run(const Commands& commands) {
  for (const Command& command : commands) {
    switch (command.kind) {
      case CommandKind::kProbe: {
        const ProbeAnswer answer = inspect(command.storage);
        run(note(calls::Probed{command.storage, answer}, engine.probed(command.storage, answer)));
        break;
      }
      case CommandKind::kGather:
        run(note(calls::Gather{}, engine.gather()));
        break;
      case CommandKind::kRecord: {
        const Lock lock(mutex_);
        recorded_.insert(command.event);
        record(command);
        break;
      }
      case CommandKind::kCopy:
        start(command);
        break;
      case CommandKind::kWait:
        // A copy that is not held back is done when its command has run.
        if (value(command.stream) != 0) {
          order(command);
        } else if (options_.hold_copies) {
          complete(command.copy);
        }
        break;
      case CommandKind::kAlloc:
        allocate_ahead(command);
        break;
      case CommandKind::kRecordStream:
        record_stream(command);
        break;
      case CommandKind::kReleaseLease: {
        Storage last;
        const Lock lock(mutex_);
        const auto item = items_.find(command.storage);
        if (item != items_.end() && --item->second.leases == 0) last = std::move(item->second.lease);
        break;
      }
      case CommandKind::kReleaseRestored: {
        std::map<CopyId, Storage>::node_type last;
        const Lock lock(mutex_);
        const auto item = items_.find(command.storage);
        if (item != items_.end()) last = item->second.restored.extract(command.copy);
        break;
      }
      case CommandKind::kGrow:
        grow(command.nbytes);
        break;
      case CommandKind::kLoadFailed: {
        const Lock lock(mutex_);
        load_failures[command.copy] = command;
        break;
      }
      case CommandKind::kForget:
        forget(command.storage);
        break;
      case CommandKind::kTierFull:
        ++tier_full;
        break;
    }
  }
}

void Driver::start(const Command& command) {
  const bool ok = !fails(command.hop);
  {
    const Lock lock(mutex_);
    for (const EventId event : command.after) {
      EXPECT_TRUE(recorded_.contains(event)) << "copy after an event that was not recorded";
    }
    if (!ok) failed_.insert(command.copy);
    if (ok && command.hop == Hop::kLoad) loaded_.insert(command.copy);
    begin_copy(command, ok);
    copies_[command.copy] = command;
  }
  if (!options_.hold_copies) complete(command.copy);
}

void Driver::complete(CopyId copy, bool ok) {
  Command command;
  {
    const Lock lock(mutex_);
    const auto found = copies_.find(copy);
    if (found == copies_.end()) return;
    command = std::move(found->second);
    copies_.erase(found);
    ok = ok && !failed_.contains(copy);
    if (!ok) {
      failed_.insert(copy);
      loaded_.erase(copy);
    }
  }
  finish_copy(command, ok);
  std::vector<ProbeAnswer> answers;
  if (command.hop == Hop::kOffload) {
    for (const StorageId storage : command.storages) answers.push_back(inspect(storage));
  }
  run(note(calls::Completed{copy, ok, answers}, engine.completed(copy, ok, answers)));
}

void Driver::begin_copy(const Command&, bool) {}

// As late as it may: what it reads or writes has to be there until it is reported.
void Driver::finish_copy(const Command& command, bool ok) {
  if (ok) move_bytes(command.plan);
}

void Driver::record(const Command&) {}

void Driver::order(const Command& command) {
  ADD_FAILURE() << "synchronous memory has no streams: " << to_string(command);
}

void Driver::record_stream(const Command& command) {
  ADD_FAILURE() << "synchronous memory has no streams: " << to_string(command);
}

void Driver::move_bytes(const Plan& plan) {
  std::vector<std::uint8_t> staging(staging_bytes(plan), kPoison);
  const auto bytes_at = [&](const Place& place, std::uint64_t nbytes, bool for_writing) {
    return place.tier == Tier::kStaging ? staging.data() + place.byte_offset : at(place, nbytes, for_writing);
  };
  for (const CopySpan& span : plan) {
    std::uint8_t* dst = bytes_at(span.dst, span.nbytes, true);
    const std::uint8_t* src = bytes_at(span.src, span.nbytes, false);
    if (dst != nullptr && src != nullptr) std::memcpy(dst, src, span.nbytes);
  }
}

std::uint8_t* Driver::at(const Place& place, std::uint64_t nbytes, bool for_writing) {
  if (place.tier == Tier::kDevice) return dynamic_cast<FakeDevice&>(device).at(place, nbytes);
  return (place.tier == space->tier() ? space : backing)->at(place, nbytes, for_writing);
}

void Driver::forget(StorageId storage) {
  std::map<StorageId, Item>::node_type item;
  {
    const Lock lock(mutex_);
    item = items_.extract(storage);
  }
  if (item.empty()) {
    ADD_FAILURE() << "forgotten twice: " << value(storage);
    return;
  }
  const bool held = item.mapped().lease != nullptr || !item.mapped().restored.empty();
  EXPECT_TRUE(options_.threads || !held) << "forgotten and never told to let go: " << value(storage);
  for (const std::uint64_t identity : item.mapped().pinned) device.unpin(identity);
}

void Driver::grow(std::uint64_t nbytes) {
  ++growths;
  const bool ok = growths_allowed-- > 0;
  if (ok) space->grow(nbytes);
  run(note(calls::Grown{ok}, engine.grown(ok)));
}

// More than any number of leases: who is just saving the storage holds it.
constexpr std::uint64_t kMany = std::uint64_t{1} << 32;

ProbeAnswer Driver::inspect(StorageId id) {
  const Lock lock(mutex_);
  const auto found = items_.find(id);
  if (found == items_.end() || found->second.lease == nullptr) return {.holders = kMany};
  const Storage& lease = found->second.lease;
  long own = 1;
  for (const auto& [other, item] : items_) {
    for (const auto& [load, restored] : item.restored) own += restored == lease;
  }
  return {.holders = static_cast<std::uint64_t>(std::max(lease.use_count() - own, 0L)),
          .same = lease->ref == found->second.ref,
          .intact = intact(found->second),
          .spoiled = spoiled(found->second)};
}

bool Driver::intact(const Item& item) {
  return std::ranges::all_of(item.versions, [](const auto& seen) { return seen.first->load() == seen.second; });
}

bool Driver::spoiled(const Item& item) {
  return !item.versions.empty() &&
         std::ranges::none_of(item.versions, [](const auto& seen) { return seen.first->load() == seen.second; });
}

void Driver::expect_at_rest() {
  EXPECT_TRUE(held().empty());
  const Stats stats = engine.stats();
  EXPECT_EQ(stats.entries, 0u);
  EXPECT_EQ(stats.device_bytes, 0u);
  EXPECT_EQ(stats.tier_bytes, 0u);
  EXPECT_EQ(stats.backing_bytes, 0u);
  EXPECT_EQ(stats.parked, 0u);
  EXPECT_EQ(space->used_bytes(), 0u);
  EXPECT_EQ(backing == nullptr ? 0u : backing->used_bytes(), 0u);
  EXPECT_EQ(device.used_bytes(), 0u);
  EXPECT_TRUE(items_.empty());
}

}  // namespace ebbtide::testing
