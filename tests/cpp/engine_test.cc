// Saving and offloading: what joins which entry, what is copied and when, and what stays.
#include "ebbtide/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ebbtide/error.h"
#include "engine_driver.h"

namespace ebbtide::testing {
namespace {

constexpr EngineConfig kUnbounded{.in_flight_bytes = UINT64_MAX};

Storage filled(Driver& driver, std::uint64_t nbytes, std::uint8_t seed = 1) {
  Storage storage = driver.device.allocate(nbytes);
  write(storage, seed);
  return storage;
}

std::vector<CommandKind> kinds(const Commands& commands) {
  std::vector<CommandKind> result;
  for (const Command& command : commands) result.push_back(command.kind);
  return result;
}

SaveRequest request(std::uint64_t identity, std::uint64_t nbytes, StreamRef stream = {}) {
  return {.storage = {DeviceId{0}, identity, 0x1000 * identity, nbytes},
          .view = bytes_view(0, nbytes),
          .epoch = EpochId{1},
          .stream = stream};
}

constexpr ProbeAnswer kFree{};
constexpr ProbeAnswer kHeld{.holders = 1};

TEST(EngineSave, WholePathAsText) {
  const auto space = std::make_shared<FakeSpace>(1 << 20);
  Engine engine({}, space);
  const EpochId epoch = engine.begin_epoch();
  const SaveVerdict saved = engine.save(
      {.storage = {DeviceId{0}, 1, 0x1040, 64}, .view = bytes_view(16, 48), .epoch = epoch, .stream = StreamRef{7}});
  EXPECT_EQ(to_string(saved),
            "new storage 1 ticket 1 lease\n"
            "record event 1 on stream 7\n"
            "probe storage 1\n");
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "d2h copy 1 of storage 1 after event 1\n"
            "device:0x1040+16 -> host:0x10000000+0, 32 bytes\n"
            "wait copy 1\n");
  EXPECT_EQ(to_string(engine.completed(CopyId{1}, true, kFree)), "release lease of storage 1\n");
  EXPECT_EQ(to_string(engine.restore(saved.ticket, PassId{1}, false, false)), "load storage 1: 48 bytes at 64\n");
  EXPECT_EQ(to_string(engine.allocated(StorageId{1}, {DeviceId{0}, 2, 0x2040, 48}, StreamRef{7})),
            "record event 2 on stream 7\n"
            "h2d copy 2 of storage 1 after event 2\n"
            "host:0x10000000+0 -> device:0x2040+16, 32 bytes\n");
  EXPECT_EQ(to_string(engine.completed(CopyId{2}, true, {})), "release restored storage 1 of copy 2\n");
  EXPECT_EQ(to_string(engine.drop(saved.ticket)), "forget storage 1\n");
  EXPECT_EQ(space->used_bytes(), 0u);
}

TEST(EngineSave, ExactDuplicateIsOneEntryAndOneCopy) {
  Driver driver;
  const EpochId epoch = driver.begin_epoch();
  Storage storage = filled(driver, 64);
  const Saved first = driver.pack(storage, bytes_view(0, 64), epoch);
  const Saved second = driver.pack(std::move(storage), bytes_view(0, 64), epoch);
  EXPECT_EQ(first.outcome, SaveOutcome::kNew);
  EXPECT_EQ(second.outcome, SaveOutcome::kDuplicate);
  EXPECT_EQ(first.storage, second.storage);
  EXPECT_NE(first.ticket, second.ticket);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.entries, 1u);
  EXPECT_EQ(stats.d2h_copies, 1u);
  EXPECT_EQ(stats.d2h_bytes, 64u);
  EXPECT_EQ(stats.freed_bytes, 64u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.drop(first);
  EXPECT_EQ(driver.engine.stats().tier_bytes, 64u);
  driver.drop(second);
  driver.expect_at_rest();
}

TEST(EngineSave, SameExtentOfAnotherKindIsNoDuplicateAndCostsNothing) {
  Driver driver;
  Storage storage = filled(driver, 64);
  ViewMeta other = bytes_view(0, 64);
  other.kind = 5;
  const Saved first = driver.pack(storage, bytes_view(0, 64), EpochId{1});
  const Saved second = driver.pack(std::move(storage), other, EpochId{1});
  EXPECT_EQ(second.outcome, SaveOutcome::kJoined);
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  driver.drop(first);
  driver.drop(second);
}

TEST(EngineSave, ViewsCostTheUnionOfTheirExtents) {
  Driver driver;
  Storage storage = filled(driver, 256);
  std::vector<Saved> saved;
  for (const auto& view : {bytes_view(0, 64), bytes_view(32, 96), bytes_view(128, 192), bytes_view(160, 176)}) {
    saved.push_back(driver.pack(storage, view, EpochId{1}));
  }
  storage.reset();
  driver.end_epoch(EpochId{1});
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.storages, 1u);
  EXPECT_EQ(stats.unique_bytes, 96u + 64u);
  EXPECT_EQ(stats.d2h_bytes, 96u + 64u);
  EXPECT_EQ(stats.d2h_copies, 2u);
  EXPECT_EQ(stats.saved_bytes, 64u + 64u + 64u + 16u);
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, PassId{1}), nullptr);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineSave, LateViewCopiesOnlyWhatIsMissing) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest save = request(1, 128);
  save.view = bytes_view(0, 64);
  const TicketId first = engine.save(save).ticket;
  (void)engine.probed(StorageId{1}, kFree);
  (void)engine.completed(CopyId{1}, true, kHeld);
  EXPECT_EQ(engine.stats().unfreed_bytes, 128u);
  save.view = bytes_view(32, 96);
  const SaveVerdict late = engine.save(save);
  EXPECT_EQ(late.outcome, SaveOutcome::kJoined);
  EXPECT_TRUE(late.lease);
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "d2h copy 2 of storage 1\n"
            "device:0x1000+64 -> host:0x10000000+64, 32 bytes\n"
            "wait copy 2\n");
  EXPECT_EQ(kinds(engine.completed(CopyId{2}, true, kFree)), std::vector{CommandKind::kReleaseLease});
  EXPECT_EQ(engine.stats().d2h_bytes, 96u);
  (void)engine.drop(first);
  (void)engine.drop(late.ticket);
  EXPECT_EQ(engine.stats().tier_bytes, 0u);
}

TEST(EngineSave, BytesSavedDuringACopyAreCopiedAfterIt) {
  Engine engine(kUnbounded, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest save = request(1, 128);
  save.view = bytes_view(0, 64);
  (void)engine.save(save);
  (void)engine.probed(StorageId{1}, kFree);
  save.view = bytes_view(0, 128);
  EXPECT_FALSE(engine.save(save).lease) << "the lease is still held";
  EXPECT_TRUE(engine.completed(CopyId{1}, true, kFree).empty()) << "not let go of before all bytes have a copy";
  EXPECT_EQ(to_string(engine.end_epoch(EpochId{1})), "probe storage 1\n");
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "d2h copy 2 of storage 1\ndevice:0x1000+64 -> host:0x10000000+64, 64 bytes\n");
  EXPECT_EQ(kinds(engine.completed(CopyId{2}, true, kFree)), std::vector{CommandKind::kReleaseLease});
}

TEST(EngineSave, AnotherVersionEpochAddressOrSizeDoesNotJoin) {
  Engine engine({.keep_last_bytes = 1 << 20}, std::make_shared<FakeSpace>(1 << 20));
  const SaveRequest base = request(1, 64);
  EXPECT_EQ(engine.save(base).outcome, SaveOutcome::kNew);
  EXPECT_EQ(engine.save(base).outcome, SaveOutcome::kDuplicate);
  SaveRequest other = base;
  other.epoch = EpochId{2};
  EXPECT_EQ(engine.save(other).outcome, SaveOutcome::kNew);
  EXPECT_EQ(engine.save(base).outcome, SaveOutcome::kDuplicate) << "the other epoch has an entry of its own";
  other = base;
  other.version = 1;
  EXPECT_EQ(engine.save(other).outcome, SaveOutcome::kNew);
  EXPECT_EQ(engine.save(other).outcome, SaveOutcome::kDuplicate);
  EXPECT_EQ(engine.save(base).outcome, SaveOutcome::kNew) << "an older version is not joined again";
  other = base;
  other.storage.address += 512;
  EXPECT_EQ(engine.save(other).outcome, SaveOutcome::kNew);
  other = base;
  other.storage.nbytes = 128;
  EXPECT_EQ(engine.save(other).outcome, SaveOutcome::kNew);
  EXPECT_EQ(engine.stats().storages, 6u);
}

TEST(EngineSave, AfterItsEpochAnEntryTakesNoViews) {
  Engine engine({.keep_last_bytes = 1 << 20}, std::make_shared<FakeSpace>(1 << 20));
  EXPECT_EQ(engine.save(request(1, 64)).outcome, SaveOutcome::kNew);
  (void)engine.end_epoch(EpochId{1});
  EXPECT_EQ(engine.save(request(1, 64)).outcome, SaveOutcome::kNew);
}

TEST(EngineSave, SpoiledByAnotherCounterIsSavedAnew) {
  Driver driver({.config = {.keep_last_bytes = 1 << 20}});
  const Storage storage = filled(driver, 64);
  const auto alias = std::make_shared<Counter>(storage->counter->load());
  const Saved before = driver.pack(storage, bytes_view(0, 64), EpochId{1});
  write(storage, 9);
  // The alias's own counter stands where the other one stood: only the check of the earlier saves tells.
  const Saved after = driver.pack(storage, bytes_view(0, 64), EpochId{1}, {}, alias);
  EXPECT_EQ(after.outcome, SaveOutcome::kNew);
  EXPECT_NE(after.storage, before.storage);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.saved_tensors, 2u);
  EXPECT_EQ(stats.saved_bytes, 128u);
  driver.drop(before);
  EXPECT_NE(driver.unpack(after, PassId{1}), nullptr);
  driver.drop(after);
}

TEST(EngineSave, SmallStoragesStayUnlessForced) {
  Engine engine({.min_bytes = 128}, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest small = request(1, 64);
  const SaveVerdict kept = engine.save(small);
  EXPECT_EQ(kept.outcome, SaveOutcome::kKept);
  EXPECT_EQ(kept.reason, KeepReason::kSmall);
  small.forced = true;
  EXPECT_EQ(engine.save(small).outcome, SaveOutcome::kNew);
  SaveRequest large = request(2, 256);
  large.view = bytes_view(0, 8);
  EXPECT_EQ(engine.save(large).outcome, SaveOutcome::kNew) << "the storage counts, not the view";
}

TEST(EngineSave, ViewOutsideItsStorageStays) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest outside = request(1, 64);
  outside.view = bytes_view(32, 65);
  EXPECT_EQ(engine.save(outside).reason, KeepReason::kUnsupported);
  outside.view.strides.clear();
  EXPECT_THROW((void)engine.save(outside), Error);
}

TEST(EngineSave, EmptyViewPinsNothing) {
  Driver driver({.config = {.prefetch_bytes = 1024}});
  Storage storage = filled(driver, 64);
  const Saved empty = driver.pack(std::move(storage), bytes_view(8, 8), EpochId{1});
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u);
  const Saved other = driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1});
  EXPECT_NE(driver.unpack(other, PassId{1}), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u) << "nothing to prefetch";
  driver.drop(empty);
  driver.drop(other);
  driver.expect_at_rest();
}

TEST(EngineSave, RecordsBeforeAnythingElseAndTheCopyNamesTheEvent) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  const SaveVerdict first = engine.save(request(1, 64, StreamRef{3}));
  EXPECT_EQ(kinds(first.commands), (std::vector{CommandKind::kRecord, CommandKind::kProbe}));
  const Command& record = first.commands.front();
  EXPECT_EQ(record.stream, StreamRef{3});
  EXPECT_EQ(record.storage, first.storage);
  const Commands copy = engine.probed(first.storage, kFree);
  EXPECT_EQ(copy.front().after, std::vector{record.event});
  EXPECT_EQ(kinds(engine.save(request(2, 64)).commands), std::vector{CommandKind::kProbe}) << "no stream, no event";
}

TEST(EngineSave, ViewsSavedOnTwoStreamsAreCopiedAfterBoth) {
  Engine engine({.keep_last_bytes = 64}, std::make_shared<FakeSpace>(1 << 20));
  SaveRequest save = request(1, 64, StreamRef{3});
  save.view = bytes_view(0, 16);
  (void)engine.save(save);
  save.view = bytes_view(16, 32);
  save.stream = StreamRef{4};
  (void)engine.save(save);
  save.view = bytes_view(8, 24);
  save.stream = StreamRef{5};
  EXPECT_TRUE(engine.save(save).commands.empty()) << "its bytes were ready before";
  save.view = bytes_view(32, 48);
  save.stream = StreamRef{3};
  (void)engine.save(save);  // covers the first event of its stream
  (void)engine.save(request(2, 64));
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "d2h copy 1 of storage 1 after event 2, 3\n"
            "device:0x1000+0 -> host:0x10000000+0, 48 bytes\n"
            "wait copy 1\n");
}

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
  const Saved last = driver.pack(filled(driver, 16), bytes_view(0, 16), EpochId{1});
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.parked, 0u);
  EXPECT_EQ(stats.d2h_bytes, 64u + 32u + 16u);
  EXPECT_EQ(stats.unfreed_bytes, 0u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : {saved, next, last}) driver.drop(one);
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

TEST(EngineOffload, ParkedAreLookedAtInTurnAndAllAtTheEndOfTheEpoch) {
  Engine engine({.probes_per_save = 2}, std::make_shared<FakeSpace>(1 << 20));
  for (std::uint64_t id = 1; id <= 5; ++id) {
    for (const Command& probe : engine.save(request(id, 64)).commands) (void)engine.probed(probe.storage, kHeld);
  }
  std::vector<StorageId> seen;
  for (int save = 0; save < 2; ++save) {
    for (const Command& probe : engine.save(request(5, 64)).commands) {
      seen.push_back(probe.storage);
      (void)engine.probed(probe.storage, kHeld);
    }
  }
  std::ranges::sort(seen);
  EXPECT_EQ(seen.size(), 4u);
  EXPECT_TRUE(std::ranges::adjacent_find(seen) == seen.end()) << "nobody twice before everybody once";
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
  const Commands commands = engine.completed(copy.front().copy, true, {.intact = false, .spoiled = true});
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
  (void)engine.completed(CopyId{1}, true, kFree);
  (void)engine.completed(CopyId{2}, true, kFree);
  EXPECT_EQ(kinds(engine.probed(StorageId{4}, kFree)), std::vector{CommandKind::kCopy});
}

TEST(EngineOffload, FullTierKeepsOnTheDeviceAndSaysSoOnce) {
  Driver driver({.tier_capacity = 100});
  std::vector<Saved> saved;
  for (int i = 0; i < 3; ++i) saved.push_back(driver.pack(filled(driver, 64), bytes_view(0, 64), EpochId{1}));
  EXPECT_EQ(driver.tier_full, 1);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kTierFull)], 2u);
  EXPECT_EQ(stats.d2h_copies, 1u);
  EXPECT_EQ(stats.device_bytes, 128u);
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, PassId{1}), nullptr);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
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

TEST(EngineStats, AddUp) {
  Driver driver({.config = {.min_bytes = 32}});
  driver.engine.kept(KeepReason::kParameter, 1000);
  std::vector<Saved> saved;
  Storage storage = filled(driver, 64);
  saved.push_back(driver.pack(storage, bytes_view(0, 32), EpochId{1}));
  saved.push_back(driver.pack(storage, bytes_view(0, 32), EpochId{1}));
  saved.push_back(driver.pack(std::move(storage), bytes_view(0, 64), EpochId{1}));
  saved.push_back(driver.pack(filled(driver, 16), bytes_view(0, 16), EpochId{1}));
  driver.end_epoch(EpochId{1});
  Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.saved_tensors, 5u);
  EXPECT_EQ(stats.saved_bytes, 1000u + 32 + 32 + 64 + 16);
  EXPECT_EQ(stats.exact_duplicates, 1u);
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kParameter)], 1u);
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kSmall)], 1u);
  EXPECT_EQ(stats.unique_bytes, 64u);
  EXPECT_EQ(stats.d2h_bytes, stats.unique_bytes);
  EXPECT_EQ(stats.freed_bytes, 64u);
  EXPECT_EQ(stats.tier_bytes, 64u);

  driver.engine.reset_stats();
  stats = driver.engine.stats();
  EXPECT_EQ(stats.saved_tensors, 0u);
  EXPECT_EQ(stats.entries, 1u);
  EXPECT_EQ(stats.tier_bytes, 64u);
  EXPECT_EQ(stats.peak_tier_bytes, 64u);
  for (const Saved& one : saved) driver.drop(one);
  saved.clear();
  driver.expect_at_rest();
}

TEST(Engine, NeedsASpace) { EXPECT_THROW(Engine({}, nullptr), Error); }

TEST(Engine, DestructorGivesBlocksBack) {
  const auto space = std::make_shared<FakeSpace>(1 << 20);
  {
    Engine engine(kUnbounded, space);
    (void)engine.save(request(1, 64));
    (void)engine.probed(StorageId{1}, kFree);
    (void)engine.completed(CopyId{1}, true, kFree);
    EXPECT_EQ(space->used_bytes(), 64u);
  }
  EXPECT_EQ(space->used_bytes(), 0u);
}

TEST(Engine, ReportsOfTheUnknownAreIgnored) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  EXPECT_TRUE(engine.drop(TicketId{5}).empty());
  EXPECT_TRUE(engine.probed(StorageId{5}, kFree).empty());
  EXPECT_TRUE(engine.completed(CopyId{5}, true, kFree).empty());
  EXPECT_TRUE(engine.allocated(StorageId{5}, {}, {}).empty());
  EXPECT_TRUE(engine.allocation_failed(StorageId{5}).empty());
  EXPECT_TRUE(engine.end_pass(PassId{5}).empty());
  engine.wait_loaded(StorageId{5});
  engine.wait_allocated(StorageId{5});
}

}  // namespace
}  // namespace ebbtide::testing
