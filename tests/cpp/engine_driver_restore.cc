// What a session does to give a saved tensor back.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "engine_driver.h"

namespace ebbtide::testing {

namespace {

constexpr int kTries = 10000;

}  // namespace

Storage Driver::unpack(const Saved& saved, PassId pass, StreamRef stream) {
  Storage found = saved.kept;
  int out_of_memory = 0;
  for (int attempt = 0; found == nullptr; ++attempt) {
    if (attempt == kTries) {
      ADD_FAILURE() << "nobody loads storage " << value(saved.storage);
      return nullptr;
    }
    Storage live;
    Storage shared;
    CopyId shared_by{};
    {
      const Lock lock(mutex_);
      const Item& item = items_.at(saved.storage);
      live = item.source.lock();
      if (live != nullptr && (live->ref != item.ref || !intact(item))) live.reset();
      shared = item.restored_weak.lock();
      shared_by = item.restored_by;
    }
    const calls::Restore call{saved.ticket, pass, live != nullptr, shared != nullptr, stream};
    const RestoreVerdict verdict = note(call, engine.restore(saved.ticket, pass, call.live, call.shared, stream));
    switch (verdict.outcome) {
      case RestoreOutcome::kLive:
        found = live;
        run(verdict.commands);
        break;
      case RestoreOutcome::kShared:
        // Another thread may have loaded it anew since it was looked at.
        if (verdict.load == shared_by) found = shared;
        run(verdict.commands);
        break;
      case RestoreOutcome::kPending:
        wait_for_other(saved.storage, verdict);
        break;
      case RestoreOutcome::kLoad: {
        live.reset();
        shared.reset();
        bool no_memory = false;
        found = load(saved, verdict, no_memory);
        if (no_memory && ++out_of_memory > 1) return nullptr;
        const Lock lock(mutex_);
        if (found == nullptr && (failed_.contains(verdict.load) || load_failures.contains(verdict.load)))
          return nullptr;
        break;
      }
    }
  }
  const std::vector<std::uint8_t> bytes = device.read(*found, extent(saved.view), stream);
  EXPECT_TRUE(!check_bytes || saved.bytes == bytes) << "wrong bytes in storage " << value(saved.storage);
  return found;
}

void Driver::wait_for_other(StorageId storage, const RestoreVerdict& verdict) {
  const bool started = engine.running(verdict.load);
  if (verdict.allocating) {
    EXPECT_TRUE(engine.wait_allocated(storage, std::chrono::seconds(60)));
  }
  wait_until_started(verdict.load);
  if (started || !has_streams()) wait(verdict.load);
}

// Null where the engine gave the load up.
Storage Driver::load(const Saved& saved, const RestoreVerdict& verdict, bool& out_of_memory) {
  Storage storage = allocate(verdict.nbytes, verdict.residue, verdict.stream);
  if (storage == nullptr) {
    out_of_memory = true;
    run(note(calls::AllocationFailed{saved.storage, verdict.load},
             engine.allocation_failed(saved.storage, verdict.load)));
    run(verdict.commands);
    return nullptr;
  }
  EXPECT_EQ(storage->ref.address % kAlignmentBytes, verdict.residue);
  adopt(saved.storage, verdict.load, storage, verdict.stream);
  run(verdict.commands);
  wait_until_started(verdict.load);
  if (!has_streams()) wait(verdict.load);
  const Lock lock(mutex_);
  return loaded_.contains(verdict.load) ? storage : nullptr;
}

// Blocks until the copy is reported: here, where copies are held back, or by the thread that started it.
void Driver::wait(CopyId copy) {
  if (options_.hold_copies) complete(copy);
  for (int i = 0; engine.running(copy) && i < kTries * 100; ++i) std::this_thread::yield();
}

void Driver::wait_until_started(CopyId load) {
  for (int i = 0; i < kTries; ++i) {
    const CopyId blocker = engine.blocker(load);
    if (value(blocker) == 0) return;
    wait(blocker);
  }
  ADD_FAILURE() << "load " << value(load) << " is never started";
}

Storage Driver::allocate(std::uint64_t nbytes, std::uint64_t residue, StreamRef stream) {
  if (failing_allocation_ > 0 && --failing_allocation_ == 0) return nullptr;
  return device.allocate(nbytes, residue, stream);
}

void Driver::allocate_ahead(const Command& command) {
  const Storage storage = allocate(command.nbytes, command.residue, command.stream);
  if (storage != nullptr) {
    adopt(command.storage, command.copy, storage, command.stream);
  } else {
    run(note(calls::AllocationFailed{command.storage, command.copy},
             engine.allocation_failed(command.storage, command.copy)));
  }
}

void Driver::adopt(StorageId id, CopyId load, const Storage& storage, StreamRef stream) {
  {
    const Lock lock(mutex_);
    const auto found = items_.find(id);
    if (found != items_.end()) {
      storage->counter = found->second.versions.front().first;
      found->second.restored[load] = storage;
      found->second.pinned.push_back(storage->ref.identity);
      device.pin(storage->ref.identity);
    }
  }
  const Commands commands =
      note(calls::Allocated{id, load, storage->ref, stream}, engine.allocated(id, load, storage->ref, stream));
  const bool refused = commands.size() == 1 && commands.front().kind == CommandKind::kReleaseRestored;
  if (!refused) {
    const Lock lock(mutex_);
    if (const auto found = items_.find(id); found != items_.end()) {
      found->second.restored_weak = storage;
      found->second.restored_by = load;
    }
  }
  run(commands);
}

}  // namespace ebbtide::testing
