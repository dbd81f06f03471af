// Offloading: what is copied and when, what is let go, and what stays.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ebbtide/error.h"
#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

TEST(EngineOffload, WindowKeepsTheTailAndCountsIt) {
  Driver driver({.config = {.keep_last_bytes = 128}});
  std::vector<Saved> saved;
  for (int i = 0; i < 5; ++i) saved.push_back(driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1}));
  driver.end_epoch(EpochId{1});
  EXPECT_EQ(driver.engine.stats().d2h_copies, 3u);
  EXPECT_EQ(driver.device.used_bytes(), 128u);
  for (int i = 4; i >= 0; --i) {
    EXPECT_NE(driver.unpack(saved[i], PassId{1}), nullptr);
    driver.drop(saved[i]);
  }
  driver.end_pass(PassId{1});
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.live_hits, 2u);
  EXPECT_EQ(stats.h2d_copies, 3u);
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kLast)], 2u);
  driver.expect_at_rest();
}

TEST(EngineOffload, TheLastStoragesSavedAreHeldForTheirLaterViewsUntilTheEpochEnds) {
  Driver driver({.config = {.keep_last_storages = 2}});
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  Storage second;
  for (int i = 0; i < 3; ++i) {
    Storage storage = filled(driver, 64);
    if (i == 1) second = storage;
    saved.push_back(driver.pack(std::move(storage), bytes_view(0, 32), epoch));
  }
  EXPECT_EQ(driver.engine.stats().d2h_copies, 1u);
  saved.push_back(driver.pack(std::exchange(second, nullptr), bytes_view(16, 64), epoch));
  EXPECT_EQ(saved.back().outcome, SaveOutcome::kJoined);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 1u);
  driver.end_epoch(epoch);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_copies, 3u);
  EXPECT_EQ(stats.d2h_bytes, 32u + 64u + 32u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  restore_and_drop(driver, saved);
}

TEST(EngineOffload, ManyBytesAreHeldForTheirLaterViewsOnlyOfTheLastTwoStorages) {
  Driver driver({.config = {.keep_last_storages = 8, .keep_last_storages_bytes = 200}});
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  for (const std::uint64_t nbytes : {64u, 64u, 64u, 64u}) {
    saved.push_back(driver.pack(filled(driver, nbytes), bytes_view(0, nbytes), epoch));
  }
  EXPECT_EQ(driver.device.used_bytes(), 192u);
  for (const std::uint64_t nbytes : {512u, 512u, 512u}) {
    saved.push_back(driver.pack(filled(driver, nbytes), bytes_view(0, nbytes), epoch));
  }
  EXPECT_EQ(driver.device.used_bytes(), 1024u);
  driver.end_epoch(epoch);
  restore_and_drop(driver, saved);
}

TEST(EngineOffload, WhatIsKeptForItsBytesStaysWhenTheLastStoragesAreLetGo) {
  Driver driver({.config = {.keep_last_bytes = 64, .keep_last_storages = 8}});
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  for (int i = 0; i < 3; ++i) saved.push_back(driver.pack(filled(driver, 64), bytes_view(0, 64), epoch));
  EXPECT_EQ(driver.engine.stats().d2h_copies, 0u);
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 2u);
  restore_and_drop(driver, saved);
}

TEST(EngineOffload, WindowsAreOfOneDevice) {
  Engine engine({.keep_last_bytes = 64}, std::make_shared<FakeSpace>(1 << 20));
  for (std::uint64_t id = 1; id <= 2; ++id) {
    SaveRequest save = request(id, 64);
    save.storage.device = DeviceId{static_cast<std::int64_t>(id)};
    EXPECT_TRUE(engine.save(save).commands.empty());
  }
}

TEST(EngineOffload, HeldByOthersIsParkedUntilItIsFree) {
  Driver driver;
  Storage held = filled(driver, 64);
  const Saved saved = driver.pack(held, bytes_view(0, 64), EpochId{1});
  EXPECT_EQ(driver.engine.stats().parked, 1u);
  const Saved next = driver.pack(filled(driver, 32), bytes_view(0, 32), EpochId{1});
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 32u);
  held.reset();
  const Saved third = driver.pack(filled(driver, 16), bytes_view(0, 16), EpochId{1});
  const Saved last = driver.pack(filled(driver, 16), bytes_view(0, 16), EpochId{1});
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.parked, 0u);
  EXPECT_EQ(stats.d2h_bytes, 64u + 32u + 16u + 16u);
  EXPECT_EQ(stats.unfreed_bytes, 0u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : {saved, next, third, last}) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineOffload, StillHeldInBackwardIsALiveHit) {
  Driver driver;
  const Storage held = filled(driver, 64);
  const Saved saved = driver.pack(held, bytes_view(0, 64), EpochId{1});
  driver.end_epoch(EpochId{1});
  EXPECT_EQ(driver.unpack(saved, PassId{1}), held);
  driver.drop(saved);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.live_hits, 1u);
  EXPECT_EQ(stats.d2h_bytes + stats.h2d_bytes, 0u);
  EXPECT_EQ(stats.parked, 0u);
}

TEST(EngineOffload, WhatLeavesTheWindowIsProbedAtOnceHoweverManyAreParked) {
  Engine engine({.probes_per_save = 1}, std::make_shared<FakeSpace>(1 << 20));
  for (std::uint64_t id = 1; id <= 8; ++id) {
    const Commands commands = engine.save(request(id, 64)).commands;
    EXPECT_EQ(commands.front().storage, StorageId{id});
    EXPECT_EQ(commands.size(), id == 1 ? 1u : 2u);
    for (const Command& probe : commands) (void)engine.probed(probe.storage, kHeld);
  }
  EXPECT_EQ(engine.stats().parked, 8u);
}

TEST(EngineOffload, ParkedAreLookedAtLessAndLessOftenAndAllAtTheEndOfTheEpoch) {
  Engine engine({.probes_per_save = 2}, std::make_shared<FakeSpace>(1 << 20));
  std::map<StorageId, std::vector<int>> looks;
  for (int save = 1; save <= 200; ++save) {
    const std::uint64_t id = std::min(save, 5);
    for (const Command& probe : engine.save(request(id, 64)).commands) {
      looks[probe.storage].push_back(save);
      (void)engine.probed(probe.storage, kHeld);
    }
  }
  ASSERT_EQ(looks.size(), 5u);
  for (const auto& [storage, saves] : looks) {
    EXPECT_GE(saves.size(), 7u) << value(storage);
    EXPECT_LE(saves.size(), 12u) << value(storage);
    EXPECT_LE(saves[1] - saves[0], 5) << "soon at first";
  }
  EXPECT_EQ(engine.end_epoch(EpochId{1}).size(), 5u);
}

TEST(EngineOffload, WrittenBeforeItsCopyIsNeverCopied) {
  Driver driver({.config = {.keep_last_bytes = 64}});
  Storage storage = filled(driver, 64);
  const Saved spoiled = driver.pack(storage, bytes_view(0, 64), EpochId{1});
  write(storage, 9);
  storage.reset();
  const Saved next = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  for (int i = 0; i < 3; ++i) driver.end_epoch(EpochId{1});
  EXPECT_EQ(driver.engine.stats().d2h_copies, 0u);
  EXPECT_EQ(driver.device.used_bytes(), 64u) << "nobody may ask for it, so it need not stay";
  driver.drop(spoiled);
  driver.drop(next);
  driver.expect_at_rest();
}

TEST(EngineOffload, ProbeThatFindsAWriteStartsNoCopy) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  const SaveVerdict saved = engine.save(request(1, 64));
  EXPECT_TRUE(engine.probed(saved.storage, {.intact = false}).empty());
  EXPECT_EQ(engine.stats().tier_bytes, 0u);
  EXPECT_TRUE(engine.end_epoch(EpochId{2}).empty()) << "not looked at again";
  EXPECT_EQ(engine.save(request(1, 64)).outcome, SaveOutcome::kNew);
}

TEST(EngineOffload, LetsGoOfAStorageThatNobodyMayAskForAnyMore) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  const SaveVerdict saved = engine.save(request(1, 64));
  const Commands commands = engine.probed(saved.storage, {.intact = false, .spoiled = true});
  EXPECT_EQ(kinds(commands), std::vector{CommandKind::kReleaseLease});
  EXPECT_EQ(engine.stats().device_bytes, 0u);
  EXPECT_EQ(engine.stats().d2h_bytes, 0u);
  EXPECT_EQ(kinds(engine.drop(saved.ticket)), std::vector{CommandKind::kForget});
}

TEST(EngineOffload, LetsGoOfAStorageThatWasSpoiledDuringItsCopy) {
  const auto space = std::make_shared<FakeSpace>(1 << 20);
  Engine engine({.in_flight_bytes = 1 << 20}, space);
  const SaveVerdict saved = engine.save(request(1, 64));
  const Commands copy = engine.probed(saved.storage, kFree);
  const Commands commands = engine.completed(copy.front().copy, true, {{.intact = false, .spoiled = true}});
  EXPECT_EQ(kinds(commands), std::vector{CommandKind::kReleaseLease});
  EXPECT_EQ(space->used_bytes(), 0u);
}

TEST(EngineOffload, ALeaseOfItsOwnIsNoHolder) {
  Engine engine({.in_flight_bytes = 1 << 20}, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest again = request(1, 64);
  const SaveVerdict first = engine.save(again);
  EXPECT_TRUE(engine.probed(first.storage, kHeld).empty());
  again.epoch = EpochId{7};
  const SaveVerdict second = engine.save(again);
  EXPECT_EQ(second.outcome, SaveOutcome::kNew);
  EXPECT_EQ(engine.stats().device_bytes, 64u) << "one storage, two leases";
  EXPECT_EQ(kinds(engine.probed(second.storage, kHeld)), std::vector{CommandKind::kCopy}) << "held by the first lease";
  EXPECT_TRUE(engine.probed(first.storage, {.holders = 2}).empty()) << "somebody else too";
}

TEST(EngineOffload, ALiveHitWaitsForTheCopyOfAnotherForwardToo) {
  Engine engine({.keep_last_bytes = 64, .in_flight_bytes = 1 << 20}, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest again = request(1, 64);
  const SaveVerdict first = engine.save(again);
  again.epoch = EpochId{2};
  const SaveVerdict second = engine.save(again);
  const CopyId copy = engine.probed(first.storage, kHeld).front().copy;
  const Commands wait = engine.restore(second.ticket, PassId{1}, true, false).commands;
  ASSERT_EQ(kinds(wait), std::vector{CommandKind::kWait});
  EXPECT_EQ(wait.front().copy, copy) << "it reads what the user may write to";
}

TEST(EngineOffload, ChangedMemoryIsNeverCopiedAndTakesNoViews) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  const SaveVerdict saved = engine.save(request(1, 64));
  EXPECT_TRUE(engine.probed(saved.storage, {.same = false}).empty());
  EXPECT_TRUE(engine.end_epoch(EpochId{2}).empty());
  EXPECT_EQ(engine.save(request(1, 64)).outcome, SaveOutcome::kNew);
  EXPECT_EQ(engine.restore(saved.ticket, PassId{1}, true, false).outcome, RestoreOutcome::kLive);
  EXPECT_THROW((void)engine.restore(saved.ticket, PassId{1}, false, false), Error);
  EXPECT_EQ(kinds(engine.drop(saved.ticket)), (std::vector{CommandKind::kReleaseLease, CommandKind::kForget}));
}

TEST(EngineOffload, TornCopyIsDiscarded) {
  Driver driver({.config = kUnbounded, .hold_copies = true});
  Storage storage = filled(driver, 64);
  const Saved saved = driver.pack(storage, bytes_view(0, 64), EpochId{1});
  const std::shared_ptr<Counter> counter = storage->counter;
  storage.reset();
  driver.end_epoch(EpochId{1});
  ASSERT_EQ(driver.held().size(), 1u);
  ++*counter;
  driver.complete_all();
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_copies, 0u);
  EXPECT_EQ(stats.tier_bytes, 0u);
  EXPECT_EQ(stats.device_bytes, 0u);
  EXPECT_THROW((void)driver.engine.restore(saved.ticket, PassId{1}, false, false), Error);
  driver.drop(saved);
  driver.expect_at_rest();
}

TEST(EngineOffload, OverTheBoundItWaitsForTheOldestCopies) {
  Engine engine({.in_flight_bytes = 128}, std::make_shared<FakeSpace>(1 << 20));
  for (std::uint64_t id = 1; id <= 4; ++id) (void)engine.save(request(id, 64));
  EXPECT_EQ(kinds(engine.probed(StorageId{1}, kFree)), std::vector{CommandKind::kCopy});
  EXPECT_EQ(kinds(engine.probed(StorageId{2}, kFree)), std::vector{CommandKind::kCopy});
  const Commands third = engine.probed(StorageId{3}, kFree);
  EXPECT_EQ(kinds(third), (std::vector{CommandKind::kCopy, CommandKind::kWait}));
  EXPECT_EQ(third.back().copy, CopyId{1});
  (void)engine.completed(CopyId{1}, true, {kFree});
  (void)engine.completed(CopyId{2}, true, {kFree});
  EXPECT_EQ(kinds(engine.probed(StorageId{4}, kFree)), std::vector{CommandKind::kCopy});
}

TEST(EngineOffload, FullTierKeepsOnTheDeviceAndSaysSoOnce) {
  Driver driver({.tier_capacity = 100});
  std::vector<Saved> saved;
  for (int i = 0; i < 3; ++i) saved.push_back(driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1}));
  EXPECT_EQ(driver.tier_full, 1);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kHostFull)], 2u);
  EXPECT_EQ(stats.d2h_copies, 1u);
  EXPECT_EQ(stats.device_bytes, 128u);
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, PassId{1}), nullptr);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineOffload, AFullFileIsNoFullHostMemory) {
  for (const Tier tier : {Tier::kHost, Tier::kFile}) {
    Driver driver({.tier_capacity = 64, .tier = tier});
    const Saved first = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
    const Saved second = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
    const auto kept = driver.engine.stats().kept;
    const bool on_disk = tier == Tier::kFile;
    EXPECT_EQ(kept[static_cast<std::size_t>(KeepReason::kHostFull)], on_disk ? 0u : 1u);
    EXPECT_EQ(kept[static_cast<std::size_t>(KeepReason::kDiskFull)], on_disk ? 1u : 0u);
    driver.drop(first);
    driver.drop(second);
    driver.expect_at_rest();
  }
}

TEST(EngineOffload, LimitOfTheConfigurationBindsBeforeTheSpace) {
  Driver driver({.config = {.max_tier_bytes = 64}});
  const Saved first = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  const Saved second = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  EXPECT_EQ(driver.engine.stats().peak_tier_bytes, 64u);
  EXPECT_EQ(driver.tier_full, 1);
  driver.drop(first);
  driver.drop(second);
}

TEST(EngineOffload, KeptForAFullTierStillTakesViews) {
  Engine engine({}, std::make_shared<FakeSpace>(16));
  SaveRequest save = request(1, 64);
  save.view = bytes_view(0, 32);
  (void)engine.save(save);
  (void)engine.probed(StorageId{1}, kFree);
  save.view = bytes_view(0, 64);
  const SaveVerdict joined = engine.save(save);
  EXPECT_EQ(joined.outcome, SaveOutcome::kJoined);
  EXPECT_TRUE(joined.commands.empty()) << "nothing tries again for the same bytes";
  EXPECT_EQ(engine.restore(joined.ticket, PassId{1}, true, false).outcome, RestoreOutcome::kLive);
}

TEST(EngineOffload, FailedCopyStaysOnTheDevice) {
  Driver driver;
  driver.fail_next_copies(1);
  const Saved saved = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  EXPECT_EQ(driver.tier_full, 1);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_copies, 0u);
  EXPECT_EQ(stats.tier_bytes, 0u);
  EXPECT_NE(driver.unpack(saved, PassId{1}), nullptr);
  EXPECT_EQ(driver.engine.stats().live_hits, 1u);
  driver.drop(saved);
  driver.expect_at_rest();
}

TEST(EngineOffload, DroppedDuringItsCopyKeepsSourceAndBlockUntilItIsDone) {
  Driver driver({.config = kUnbounded, .hold_copies = true});
  const Saved saved = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  driver.drop(saved);
  EXPECT_EQ(driver.engine.stats().entries, 1u);
  EXPECT_EQ(driver.device.used_bytes(), 64u);
  EXPECT_EQ(driver.space->used_bytes(), 64u);
  driver.complete_all();
  driver.expect_at_rest();

  const Saved failing = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  driver.drop(failing);
  driver.complete(driver.held().front(), false);
  EXPECT_EQ(driver.tier_full, 0) << "nobody is left to be warned for";
  driver.expect_at_rest();
}

TEST(EngineOffload, DroppedInTheWindowOrParkedOrProbedIsForgotten) {
  Driver windowed({.config = {.keep_last_bytes = 1024}});
  windowed.drop(windowed.pack(filled(windowed, 64), bytes_view(0, 64), EpochId{1}));
  windowed.expect_at_rest();

  Driver parked;
  Storage held = filled(parked, 64);
  parked.drop(parked.pack(held, bytes_view(0, 64), EpochId{1}));
  held.reset();
  parked.end_epoch(EpochId{1});
  parked.expect_at_rest();

  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  const SaveVerdict saved = engine.save(request(1, 64));
  EXPECT_EQ(kinds(engine.drop(saved.ticket)), (std::vector{CommandKind::kReleaseLease, CommandKind::kForget}));
  EXPECT_TRUE(engine.probed(saved.storage, kFree).empty()) << "an answer may come too late";
}

TEST(EngineOffload, FileTierCountsSpilledBytes) {
  Driver driver({.tier = Tier::kFile});
  const Saved saved = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  EXPECT_EQ(driver.engine.stats().spilled_bytes, 64u);
  EXPECT_NE(driver.unpack(saved, PassId{1}), nullptr);
  driver.drop(saved);
}

TEST(EngineOffload, ReusedAddressIsAnotherStorage) {
  Driver driver;
  const Saved first = driver.pack(filled(driver, 64, 1), bytes_view(0, 64), EpochId{1});
  Storage next = filled(driver, 64, 2);
  const Saved second = driver.pack(std::move(next), bytes_view(0, 64), EpochId{1});
  EXPECT_EQ(second.outcome, SaveOutcome::kNew);
  EXPECT_NE(driver.unpack(second, PassId{1}), nullptr);
  EXPECT_NE(driver.unpack(first, PassId{1}), nullptr);
  driver.drop(first);
  driver.drop(second);
  driver.expect_at_rest();
}

}  // namespace
}  // namespace ebbtide::testing
