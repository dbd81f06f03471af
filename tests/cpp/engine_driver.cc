#include "engine_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ebbtide::testing {

namespace {

constexpr std::uint8_t kPoison = 0xdd;
constexpr std::uint64_t kSlabBase = 0x10000000;
constexpr std::uint64_t kDeviceBase = 0x1000;

}  // namespace

std::optional<Block> FakeSpace::allocate(std::uint64_t nbytes, std::uint64_t limit) {
  const std::lock_guard lock(mutex_);
  EXPECT_GT(nbytes, 0u);
  std::uint64_t used = nbytes;
  std::uint64_t begin = 0;
  bool fits = false;
  for (const auto& [block_begin, block_nbytes] : blocks_) {
    used += block_nbytes;
    if (!fits && begin + nbytes <= block_begin) fits = true;
    if (!fits) begin = block_begin + block_nbytes;
  }
  if (used > limit || begin + nbytes > memory_.size()) return std::nullopt;
  blocks_[begin] = nbytes;
  std::memset(memory_.data() + begin, kPoison, nbytes);
  return Block{{tier_, tier_ == Tier::kFile ? 0 : kSlabBase, begin}, nbytes};
}

void FakeSpace::free(const Block& block) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block.place.byte_offset);
  if (found == blocks_.end() || found->second != block.nbytes) {
    ADD_FAILURE() << "freed a block that was not handed out: " << to_string(block.place);
    return;
  }
  std::memset(memory_.data() + block.place.byte_offset, kPoison, block.nbytes);
  blocks_.erase(found);
}

std::uint64_t FakeSpace::used_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t used = 0;
  for (const auto& [begin, nbytes] : blocks_) used += nbytes;
  return used;
}

std::uint8_t* FakeSpace::at(const Place& place, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(place.byte_offset);
  if (block == blocks_.begin() || (--block)->first + block->second < place.byte_offset + nbytes) {
    ADD_FAILURE() << "a copy touches a block that is free: " << to_string(place);
    return nullptr;
  }
  return memory_.data() + place.byte_offset;
}

FakeStorage::FakeStorage(FakeDevice& on, std::uint64_t address, std::uint64_t nbytes, std::uint64_t identity)
    : device(on), ref{DeviceId{0}, identity, address, nbytes}, bytes(nbytes, kPoison) {}

FakeStorage::~FakeStorage() {
  {
    const std::lock_guard lock(device.mutex_);
    device.live_.erase(ref.address);
    device.used_ -= ref.nbytes;
  }
  device.unpin(ref.identity);
}

Storage FakeDevice::allocate(std::uint64_t nbytes, std::uint64_t residue) {
  const std::lock_guard lock(mutex_);
  if (used_ + nbytes > capacity_) return nullptr;
  std::uint64_t address = kDeviceBase + residue;
  for (const auto& [live_address, live] : live_) {
    if (address + std::max<std::uint64_t>(nbytes, 1) <= live_address) break;
    while (address < live_address + std::max<std::uint64_t>(live->ref.nbytes, 1)) address += kAlignmentBytes;
  }
  std::uint64_t identity = 1;
  while (pins_.contains(identity)) ++identity;
  pins_[identity] = 1;
  auto storage = std::make_shared<FakeStorage>(*this, address, nbytes, identity);
  live_[address] = storage.get();
  used_ += nbytes;
  return storage;
}

std::uint8_t* FakeDevice::at(const Place& place, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto live = live_.find(place.base);
  if (live == live_.end() || place.byte_offset + nbytes > live->second->ref.nbytes) {
    ADD_FAILURE() << "a copy touches a storage that is gone or smaller: " << to_string(place);
    return nullptr;
  }
  return live->second->bytes.data() + place.byte_offset;
}

std::uint64_t FakeDevice::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

void FakeDevice::pin(std::uint64_t identity) {
  const std::lock_guard lock(mutex_);
  ++pins_[identity];
}

void FakeDevice::unpin(std::uint64_t identity) {
  const std::lock_guard lock(mutex_);
  if (--pins_[identity] == 0) pins_.erase(identity);
}

Driver::Driver(const DriverOptions& options)
    : device(options.device_capacity),
      space(std::make_shared<FakeSpace>(options.tier_capacity, options.tier)),
      engine(options.config, space),
      options_(options) {}

template <class Made>
Made Driver::note(const Call& call, Made made) {
  if (options_.record) journal.push_back({call, to_string(made)});
  return made;
}

EpochId Driver::begin_epoch() {
  const EpochId epoch = engine.begin_epoch();
  if (options_.record) journal.push_back({calls::BeginEpoch{}, std::to_string(value(epoch))});
  return epoch;
}

void Driver::end_epoch(EpochId epoch) { run(note(calls::EndEpoch{epoch}, engine.end_epoch(epoch))); }

Saved Driver::pack(Storage storage, const ViewMeta& view, EpochId epoch, StreamRef stream,
                   std::shared_ptr<Counter> counter) {
  Saved saved;
  saved.view = view;
  saved.counter = counter != nullptr ? std::move(counter) : storage->counter;
  saved.version = saved.counter->load();
  const ByteRange range = extent(view);
  saved.bytes.assign(storage->bytes.data() + range.begin, storage->bytes.data() + range.end);
  const StorageRef ref = storage->ref;
  return save(std::move(storage), std::move(saved), {ref, view, saved.version, epoch, stream, false, false});
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

Storage Driver::unpack(const Saved& saved, PassId pass) {
  Storage found = saved.kept;
  for (int attempt = 0; found == nullptr; ++attempt) {
    Storage live;
    Storage shared;
    StorageRef source;
    {
      const Lock lock(mutex_);
      const Item& item = items_.at(saved.storage);
      source = item.ref;
      live = item.source.lock();
      if (live != nullptr && (live->ref != item.ref || !intact(item))) live.reset();
      shared = item.restored_weak.lock();
    }
    const calls::Restore call{saved.ticket, pass, live != nullptr, shared != nullptr};
    const RestoreVerdict verdict = note(call, engine.restore(saved.ticket, pass, call.live, call.shared));
    switch (verdict.outcome) {
      case RestoreOutcome::kLive:
        found = live;
        run(verdict.commands);
        break;
      case RestoreOutcome::kShared:
        found = shared;
        run(verdict.commands);
        break;
      case RestoreOutcome::kPending:
        if (!options_.hold_copies) {
          engine.wait_allocated(saved.storage);
          engine.wait_loaded(saved.storage);
        } else {
          wait(verdict.load);
        }
        break;
      case RestoreOutcome::kLoad: {
        live.reset();
        shared.reset();
        Storage storage = device.allocate(verdict.nbytes, verdict.residue);
        if (storage == nullptr) {
          run(note(calls::AllocationFailed{saved.storage}, engine.allocation_failed(saved.storage)));
          run(verdict.commands);
          if (attempt > 0) return nullptr;
          break;
        }
        EXPECT_EQ(storage->ref.address % kAlignmentBytes, source.address % kAlignmentBytes);
        // Not what the item says by now: after a failure another thread may have begun the next load.
        const CopyId load = adopt(saved.storage, storage);
        run(verdict.commands);
        wait(load);
        const Lock lock(mutex_);
        if (!done_.contains(load)) return nullptr;
        found = storage;
        break;
      }
    }
  }
  const ByteRange range = extent(saved.view);
  EXPECT_TRUE(std::equal(saved.bytes.begin(), saved.bytes.end(), found->bytes.begin() + range.begin))
      << "wrong bytes in storage " << value(saved.storage);
  return found;
}

void Driver::drop(const Saved& saved) {
  if (saved.outcome != SaveOutcome::kKept) run(note(calls::Drop{saved.ticket}, engine.drop(saved.ticket)));
}

void Driver::end_pass(PassId pass) { run(note(calls::EndPass{pass}, engine.end_pass(pass))); }

std::vector<CopyId> Driver::held() const {
  const Lock lock(mutex_);
  std::vector<CopyId> copies;
  for (const auto& [copy, command] : copies_) copies.push_back(copy);
  return copies;
}

void Driver::complete_all() {
  for (std::vector<CopyId> copies = held(); !copies.empty(); copies = held()) complete(copies.front());
}

void Driver::run(const Commands& commands) {
  for (const Command& command : commands) {
    switch (command.kind) {
      case CommandKind::kProbe: {
        const ProbeAnswer answer = inspect(command.storage);
        run(note(calls::Probed{command.storage, answer}, engine.probed(command.storage, answer)));
        break;
      }
      case CommandKind::kRecord: {
        const Lock lock(mutex_);
        recorded_.insert(command.event);
        break;
      }
      case CommandKind::kCopy:
        start(command);
        break;
      case CommandKind::kWait:
        wait(command.copy);
        break;
      case CommandKind::kAlloc: {
        const Storage storage = device.allocate(command.nbytes, command.residue);
        if (storage != nullptr) {
          adopt(command.storage, storage);
        } else {
          run(note(calls::AllocationFailed{command.storage}, engine.allocation_failed(command.storage)));
        }
        break;
      }
      case CommandKind::kReleaseLease: {
        Storage last;
        const Lock lock(mutex_);
        const auto item = items_.find(command.storage);
        if (item != items_.end() && --item->second.leases == 0) last = std::move(item->second.lease);
        break;
      }
      case CommandKind::kReleaseRestored: {
        Storage last;
        const Lock lock(mutex_);
        const auto item = items_.find(command.storage);
        if (item != items_.end() && item->second.load == command.copy) last = std::move(item->second.restored);
        break;
      }
      case CommandKind::kForget: {
        std::map<StorageId, Item>::node_type item;
        {
          const Lock lock(mutex_);
          item = items_.extract(command.storage);
        }
        EXPECT_FALSE(item.empty()) << "forgotten twice: " << value(command.storage);
        for (const std::uint64_t identity : item.mapped().pinned) device.unpin(identity);
        break;
      }
      case CommandKind::kTierFull:
        ++tier_full;
        break;
    }
  }
}

void Driver::start(const Command& command) {
  {
    const Lock lock(mutex_);
    copies_[command.copy] = command;
    for (const EventId event : command.after) {
      EXPECT_TRUE(recorded_.contains(event)) << "copy after an event that was not recorded";
    }
    if (command.to_device) items_.at(command.storage).load = command.copy;
  }
  if (!options_.hold_copies) complete(command.copy);
}

// Held copies move their bytes as late as they may: what they read or write has to be there until they are reported.
void Driver::complete(CopyId copy, bool ok) {
  Command command;
  {
    const Lock lock(mutex_);
    const auto found = copies_.find(copy);
    if (found == copies_.end()) return;
    command = found->second;
    copies_.erase(found);
  }
  if (failing_ > 0) {
    --failing_;
    ok = false;
  }
  if (ok) move_bytes(command.plan);
  const ProbeAnswer answer = command.to_device ? ProbeAnswer{} : inspect(command.storage);
  const Commands commands = note(calls::Completed{copy, ok, answer}, engine.completed(copy, ok, answer));
  if (ok) {
    const Lock lock(mutex_);
    done_.insert(copy);
  }
  run(commands);
}

void Driver::wait(CopyId copy) {
  // A copy that is not held back is done when its command has run.
  if (options_.hold_copies) complete(copy);
}

void Driver::move_bytes(const Plan& plan) {
  for (const CopySpan& span : plan) {
    std::uint8_t* dst = at(span.dst, span.nbytes);
    const std::uint8_t* src = at(span.src, span.nbytes);
    if (dst != nullptr && src != nullptr) std::memcpy(dst, src, span.nbytes);
  }
}

std::uint8_t* Driver::at(const Place& place, std::uint64_t nbytes) {
  return place.tier == Tier::kDevice ? device.at(place, nbytes) : space->at(place, nbytes);
}

CopyId Driver::adopt(StorageId id, const Storage& storage) {
  Storage earlier;
  {
    const Lock lock(mutex_);
    Item& item = items_.at(id);
    storage->counter = item.versions.front().first;
    earlier = std::exchange(item.restored, storage);
    item.load = CopyId{};
    item.restored_weak = storage;
    item.pinned.push_back(storage->ref.identity);
    device.pin(storage->ref.identity);
  }
  const Commands commands = note(calls::Allocated{id, storage->ref, {}}, engine.allocated(id, storage->ref, {}));
  run(commands);
  return commands.empty() ? CopyId{} : commands.back().copy;
}

// More than any number of leases: who is just saving the storage holds it.
constexpr std::uint64_t kMany = std::uint64_t{1} << 32;

ProbeAnswer Driver::inspect(StorageId id) {
  const Lock lock(mutex_);
  const auto found = items_.find(id);
  if (found == items_.end() || found->second.lease == nullptr) return {.holders = kMany};
  const Storage& lease = found->second.lease;
  long own = 1;
  for (const auto& [other, item] : items_) own += item.restored == lease;
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
  EXPECT_EQ(stats.parked, 0u);
  EXPECT_EQ(space->used_bytes(), 0u);
  EXPECT_EQ(device.used_bytes(), 0u);
  EXPECT_TRUE(items_.empty());
}

ViewMeta bytes_view(std::uint64_t begin, std::uint64_t end) {
  return {static_cast<std::int64_t>(begin), 1, 0, {static_cast<std::int64_t>(end - begin)}, {1}};
}

void write(const Storage& storage, std::uint8_t seed, const std::shared_ptr<Counter>& counter) {
  for (std::size_t i = 0; i < storage->bytes.size(); ++i) storage->bytes[i] = static_cast<std::uint8_t>(seed + 7 * i);
  ++*(counter != nullptr ? counter : storage->counter);
}

}  // namespace ebbtide::testing
