// Saving: what joins which entry, and which bytes of it are new.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebbtide/error.h"
#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

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
            "offload copy 1 of storage 1 after event 1\n"
            "device:0x1040+16 -> host:0x10000000+0, 32 bytes\n"
            "probe storage 1\n");
  EXPECT_EQ(to_string(engine.completed(CopyId{1}, true, {kFree})), "release lease of storage 1\n");
  EXPECT_EQ(to_string(engine.restore(saved.ticket, PassId{1}, false, false, StreamRef{7})),
            "load storage 1: 48 bytes at 64 on copy 2\n");
  EXPECT_EQ(to_string(engine.allocated(StorageId{1}, CopyId{2}, {DeviceId{0}, 2, 0x2040, 48}, StreamRef{7})),
            "record event 2 on stream 7\n"
            "load copy 2 of storage 1 after event 2\n"
            "host:0x10000000+0 -> device:0x2040+16, 32 bytes\n"
            "wait copy 2 on stream 7\n"
            "release restored storage 1 of copy 2\n");
  EXPECT_TRUE(engine.completed(CopyId{2}, true, {}).empty());
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
  (void)engine.completed(CopyId{1}, true, {kHeld});
  EXPECT_EQ(engine.stats().unfreed_bytes, 128u);
  save.view = bytes_view(32, 96);
  const SaveVerdict late = engine.save(save);
  EXPECT_EQ(late.outcome, SaveOutcome::kJoined);
  EXPECT_TRUE(late.lease);
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "offload copy 2 of storage 1\n"
            "device:0x1000+64 -> host:0x10000000+64, 32 bytes\n"
            "wait copy 2\n");
  EXPECT_EQ(kinds(engine.completed(CopyId{2}, true, {kFree})), std::vector{CommandKind::kReleaseLease});
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
  EXPECT_TRUE(engine.completed(CopyId{1}, true, {kFree}).empty()) << "not let go of before all bytes have a copy";
  EXPECT_EQ(to_string(engine.end_epoch(EpochId{1})), "probe storage 1\n");
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "offload copy 2 of storage 1\ndevice:0x1000+64 -> host:0x10000000+64, 64 bytes\n");
  EXPECT_EQ(kinds(engine.completed(CopyId{2}, true, {kFree})), std::vector{CommandKind::kReleaseLease});
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
  EXPECT_EQ(kinds(engine.save(save).commands), std::vector{CommandKind::kRecord}) << "it is read there";
  save.view = bytes_view(32, 48);
  save.stream = StreamRef{3};
  (void)engine.save(save);  // covers the first event of its stream
  (void)engine.save(request(2, 64));
  EXPECT_EQ(to_string(engine.probed(StorageId{1}, kFree)),
            "offload copy 1 of storage 1 after event 4, event 2, event 3\n"
            "device:0x1000+0 -> host:0x10000000+0, 48 bytes\n"
            "probe storage 1\n");
}

}  // namespace
}  // namespace ebbtide::testing
