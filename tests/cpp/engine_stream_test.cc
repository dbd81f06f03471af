// Memory whose work is asynchronous: what is let go of before it is done, and the order that makes it safe.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ebbtide/error.h"
#include "engine_test_support.h"
#include "stream_driver.h"

namespace ebbtide::testing {
namespace {

constexpr EngineConfig kAtOnce{.in_flight_bytes = 0};
constexpr std::uint64_t kBytes = 64;

Saved pack(StreamDriver& driver, Storage storage, EpochId epoch = EpochId{1}, StreamRef stream = kMain) {
  const ViewMeta view = bytes_view(0, storage->ref.nbytes);
  return driver.pack(std::move(storage), view, epoch, stream);
}

TEST(EngineStream, OverTheBoundMemoryIsLetGoOfBeforeTheCopyHasRun) {
  StreamDriver driver({.config = kAtOnce});
  const Saved saved = pack(driver, driver.filled(kBytes));
  ASSERT_EQ(driver.held().size(), 1u);
  EXPECT_FALSE(driver.has_run(driver.held().front()));
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u);
  EXPECT_EQ(driver.engine.stats().freed_bytes, kBytes);
  // Whoever gets the memory next writes to it.
  const Storage next = driver.filled(kBytes, 99);
  EXPECT_NE(driver.unpack(saved, kPass, kMain), nullptr) << "loaded after the copy that nobody has seen done";
  EXPECT_EQ(driver.held().size(), 2u);
  driver.drop(saved);
  driver.complete_all();
  EXPECT_EQ(driver.races(), std::vector<std::string>{});
}

TEST(EngineStream, BelowTheBoundTheLeaseWaitsUntilTheCopyIsSeenDone) {
  StreamDriver driver({.config = kUnbounded});
  const Saved saved = pack(driver, driver.filled(kBytes));
  EXPECT_EQ(driver.device.used_bytes(), kBytes);
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.drop(saved);
  driver.expect_at_rest();
}

TEST(EngineStream, WhatOthersHoldIsNotLetGoOf) {
  StreamDriver driver({.config = {.in_flight_bytes = kBytes}});
  Storage storage = driver.filled(kBytes);
  const Saved saved = pack(driver, storage);
  EXPECT_TRUE(driver.held().empty()) << "parked";
  const Saved other = pack(driver, driver.filled(kBytes));
  ASSERT_EQ(driver.held().size(), 1u);
  const Storage again = driver.unpack(other, PassId{}, kMain);  // a live hit on what is in flight
  storage.reset();
  driver.end_epoch(EpochId{1});
  EXPECT_EQ(driver.device.used_bytes(), 2 * kBytes) << "in flight; and held";
  EXPECT_FALSE(driver.has_run(driver.held().front())) << "a live hit does not hold up the device";
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, kBytes) << "who holds it may have written to it: the copy is not used";
  driver.drop(saved);
  driver.drop(other);
}

TEST(EngineStream, AStorageGivenToSomebodyDuringItsCopyIsCopiedAgainWhenItIsFree) {
  StreamDriver driver({.config = kUnbounded});
  const Saved saved = pack(driver, driver.filled(kBytes));
  Storage live = driver.unpack(saved, kPass, kMain);
  EXPECT_EQ(driver.engine.stats().live_hits, 1u);
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), kBytes);
  EXPECT_EQ(driver.space->used_bytes(), 0u);
  live.reset();
  driver.end_epoch(EpochId{1});
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_NE(driver.unpack(saved, kNextPass, kMain), nullptr);
  driver.drop(saved);
  driver.complete_all();
  driver.expect_at_rest();
}

TEST(EngineStream, ARunningLoadIsSharedInDeviceOrder) {
  StreamDriver driver({.config = kUnbounded});
  Storage storage = driver.filled(kBytes);
  const Saved first = driver.pack(storage, bytes_view(0, 32), EpochId{1}, kMain);
  const Saved second = driver.pack(std::move(storage), bytes_view(32, kBytes), EpochId{1}, kMain);
  driver.end_epoch(EpochId{1});
  driver.complete_all();
  const Storage restored = driver.unpack(first, kPass, kMain);
  EXPECT_EQ(driver.unpack(second, kPass, kMain), restored);
  EXPECT_EQ(driver.unpack(second, kPass, kSide), restored);
  EXPECT_EQ(driver.held().size(), 1u) << "nobody has waited for it";
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u) << "every claim is served";
  driver.drop(first);
  driver.drop(second);
  EXPECT_EQ(driver.engine.stats().entries, 0u);
  EXPECT_EQ(driver.space->used_bytes(), kBytes) << "a copy reads the block";
  driver.complete_all();
  EXPECT_EQ(driver.space->used_bytes(), 0u);
  EXPECT_EQ(driver.races(), std::vector<std::string>{});
}

TEST(EngineStream, AGraphMayBeDroppedWithCopiesInFlightBothWays) {
  StreamDriver driver({.config = {.prefetch_bytes = 256, .in_flight_bytes = UINT64_MAX}});
  std::vector<Saved> saved;
  for (int i = 0; i < 4; ++i) saved.push_back(pack(driver, driver.filled(kBytes, static_cast<std::uint8_t>(i))));
  driver.complete_all();
  EXPECT_NE(driver.unpack(saved[3], kPass, kMain), nullptr);
  const Saved leaving = pack(driver, driver.filled(kBytes, 7));
  EXPECT_EQ(driver.held(Hop::kLoad).size(), 4u);
  EXPECT_EQ(driver.held(Hop::kOffload).size(), 1u);
  for (const Saved& one : saved) driver.drop(one);
  driver.drop(leaving);
  EXPECT_EQ(driver.engine.stats().entries, 0u);
  EXPECT_EQ(driver.device.used_bytes(), 0u) << "in device order";
  EXPECT_EQ(driver.space->used_bytes(), 5 * kBytes) << "copies read and write the blocks";
  // Their memory is used again at once.
  std::vector<Storage> next;
  for (int i = 0; i < 6; ++i) next.push_back(driver.filled(kBytes, static_cast<std::uint8_t>(50 + i)));
  driver.complete_all();
  next.clear();
  driver.end_pass(kPass);
  driver.expect_at_rest();
}

TEST(EngineStream, ABlockIsNotUsedAgainBeforeTheCopyThatReadsItIsReported) {
  StreamDriver driver({.config = kUnbounded, .tier_capacity = kBytes});
  const Saved first = pack(driver, driver.filled(kBytes, 1));
  driver.complete_all();
  const Storage restored = driver.unpack(first, kPass, kMain);
  driver.drop(first);
  const Saved second = pack(driver, driver.filled(kBytes, 2));
  EXPECT_EQ(driver.engine.stats().kept[static_cast<std::size_t>(KeepReason::kHostFull)], 1u);
  driver.complete_all();
  const Saved third = pack(driver, driver.filled(kBytes, 3));
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 2 * kBytes);
  EXPECT_NE(driver.unpack(second, kPass, kMain), nullptr);
  EXPECT_NE(driver.unpack(third, kPass, kMain), nullptr);
  driver.drop(second);
  driver.drop(third);
  EXPECT_EQ(driver.races(), std::vector<std::string>{});
}

TEST(EngineStream, ABlockIsNotUsedAgainBeforeTheCopyThatWritesItIsReported) {
  StreamDriver driver({.config = kAtOnce, .tier_capacity = kBytes});
  driver.drop(pack(driver, driver.filled(kBytes, 1)));
  EXPECT_EQ(driver.engine.stats().entries, 0u);
  EXPECT_EQ(driver.space->used_bytes(), kBytes);
  const Saved second = pack(driver, driver.filled(kBytes, 2));
  EXPECT_EQ(driver.tier_full, 1);
  driver.complete_all();
  EXPECT_EQ(driver.space->used_bytes(), 0u);
  driver.drop(second);
  driver.expect_at_rest();
}

TEST(EngineStream, AFailedCopyOfWhatWasLetGoOfIsAnErrorWhenItIsAskedFor) {
  StreamDriver driver({.config = kAtOnce});
  driver.fail_next_copies(1);
  const Saved saved = pack(driver, driver.filled(kBytes));
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.complete_all();
  EXPECT_EQ(driver.space->used_bytes(), 0u);
  try {
    (void)driver.engine.restore(saved.ticket, kPass, false, false, kMain);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kDevice);
  }
  driver.drop(saved);
  driver.expect_at_rest();
}

TEST(EngineStream, ALoadThatCameAfterAFailedCopyIsNotUsedAgain) {
  Bare bare(kAtOnce);
  const SaveVerdict saved = bare.engine.save(request(1, kBytes, kMain));
  const CopyId copy = bare.engine.probed(saved.storage, kFree).front().copy;
  EXPECT_EQ(kinds(bare.engine.probed(saved.storage, kFree)),
            (std::vector{CommandKind::kRecordStream, CommandKind::kReleaseLease}));
  const RestoreVerdict verdict = bare.engine.restore(saved.ticket, kPass, false, false, kMain);
  const Commands load = bare.allocate(saved.storage, verdict.load, kBytes, kMain);
  EXPECT_EQ(find(load, CommandKind::kCopy)->after_copies, std::vector{copy});
  (void)bare.engine.completed(copy, false, {kFree});
  EXPECT_THROW((void)bare.engine.restore(saved.ticket, kPass, false, true, kMain), Error) << "before it is reported";
  (void)bare.engine.completed(verdict.load, true, {});
  EXPECT_THROW((void)bare.engine.restore(saved.ticket, kPass, false, true, kMain), Error);
  EXPECT_EQ(bare.engine.stats().tier_bytes, 0u);
}

TEST(EngineStream, ALoadThatWaitsForAFailedCopyIsGivenUp) {
  Bare bare(kAtOnce);
  const SaveVerdict saved = bare.engine.save(request(1, kBytes, kMain));
  const CopyId copy = bare.engine.probed(saved.storage, kFree).front().copy;
  (void)bare.engine.probed(saved.storage, kFree);
  const RestoreVerdict verdict = bare.engine.restore(saved.ticket, kPass, false, false, kMain);
  const Commands failed = bare.engine.completed(copy, false, {kFree});
  ASSERT_NE(find(failed, CommandKind::kLoadFailed), nullptr);
  EXPECT_EQ(find(failed, CommandKind::kLoadFailed)->copy, verdict.load);
  EXPECT_EQ(find(failed, CommandKind::kLoadFailed)->cause, copy);
  EXPECT_EQ(kinds(bare.allocate(saved.storage, verdict.load, kBytes, kMain)),
            std::vector{CommandKind::kReleaseRestored});
}

TEST(EngineStream, MemoryIsNotLetGoOfWhileSomeOfItsBytesHaveNoCopy) {
  StreamDriver driver({.config = {.in_flight_bytes = kBytes}});
  Storage storage = driver.filled(kBytes);
  const std::shared_ptr<Counter> counter = storage->counter;
  const Saved first = driver.pack(storage, bytes_view(0, 16), EpochId{1}, kMain);
  storage.reset();
  driver.end_epoch(EpochId{1});
  ASSERT_EQ(driver.held().size(), 1u);
  Storage live = driver.unpack(first, PassId{}, kMain);
  const Saved second = driver.pack(std::move(live), bytes_view(0, kBytes), EpochId{1}, kMain);
  const Saved other = pack(driver, driver.filled(kBytes));  // over the bound
  driver.complete_all();
  driver.end_epoch(EpochId{1});
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : {first, second, other}) EXPECT_NE(driver.unpack(one, kPass, kMain), nullptr);
  for (const Saved& one : {first, second, other}) driver.drop(one);
  driver.complete_all();
  driver.expect_at_rest();
}

TEST(EngineStream, BytesSavedDuringTheCopyKeepTheLease) {
  Bare bare(kAtOnce);
  SaveRequest save = request(1, kBytes, kMain);
  save.view = bytes_view(0, 16);
  const SaveVerdict first = bare.engine.save(save);
  ASSERT_EQ(kinds(bare.engine.probed(first.storage, kFree)), (std::vector{CommandKind::kCopy, CommandKind::kProbe}));
  save.view = bytes_view(0, kBytes);
  (void)bare.engine.save(save);
  EXPECT_TRUE(bare.engine.probed(first.storage, kFree).empty());
  EXPECT_EQ(bare.engine.stats().device_bytes, kBytes);
}

TEST(EngineStream, BytesThatARunningLoadDoesNotBringAreLoadedAfterIt) {
  Bare bare(kUnbounded);
  const TicketId first = bare.offload(bytes_view(0, 16), kMain);
  SaveRequest late = request(1, kBytes, kMain);
  late.view = bytes_view(32, kBytes);
  const TicketId second = bare.engine.save(late).ticket;
  const CopyId copy = bare.engine.probed(StorageId{1}, kFree).front().copy;
  const CopyId load = bare.engine.restore(first, kPass, false, false, kMain).load;
  (void)bare.allocate(StorageId{1}, load, 16, kMain);
  (void)bare.engine.completed(copy, true, {kFree});
  const RestoreVerdict verdict = bare.engine.restore(second, kPass, false, true, kMain);
  EXPECT_EQ(verdict.outcome, RestoreOutcome::kPending) << "its memory is not let go of while it is written";
  EXPECT_EQ(verdict.load, load);
  (void)bare.engine.completed(load, true, {});
  EXPECT_EQ(bare.engine.restore(second, kPass, false, true, kMain).outcome, RestoreOutcome::kLoad);
}

TEST(EngineStream, AStorageThatTwoForwardsSavedIsNotLetGoOfUnderTheOther) {
  StreamDriver driver({.config = {.keep_last_bytes = kBytes, .in_flight_bytes = 0}});
  const EpochId first_epoch = driver.begin_epoch();
  const EpochId second_epoch = driver.begin_epoch();
  Storage storage = driver.filled(kBytes, 1);
  const std::shared_ptr<Counter> counter = storage->counter;
  const Saved first = pack(driver, storage, first_epoch);
  const Saved second = pack(driver, std::move(storage), second_epoch);  // pushes the first out of the window
  driver.end_epoch(first_epoch);
  ASSERT_EQ(driver.held().size(), 1u);
  EXPECT_EQ(driver.device.used_bytes(), kBytes);
  // The second is still there: whoever gets it may write to it, under the copy of the first.
  const Storage live = driver.unpack(second, kPass, kMain);
  ASSERT_NE(live, nullptr);
  write(live, 77, std::make_shared<Counter>(0), kMain);
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 0u) << "the copy is not used";
  driver.drop(first);
  driver.drop(second);
}

TEST(EngineStream, PacksCrossInDeviceOrderToo) {
  StreamDriver driver(
      {.config = {.keep_last_groups = 0, .prefetch_groups = 0, .in_flight_bytes = 0, .pack_below_bytes = 128}});
  const EpochId epoch = driver.begin_epoch();
  driver.begin_group(epoch, 1);
  std::vector<Saved> saved;
  for (int i = 0; i < 4; ++i) saved.push_back(pack(driver, driver.filled(40, static_cast<std::uint8_t>(9 * i)), epoch));
  driver.end_group();
  ASSERT_EQ(driver.held().size(), 1u);
  EXPECT_EQ(driver.device.used_bytes(), 0u) << "each of them let go of";
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    EXPECT_NE(driver.unpack(*one, kPass, kMain), nullptr);
    driver.drop(*one);
  }
  EXPECT_EQ(driver.held().size(), 2u);
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_copies, 1u);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 160u);
  driver.end_pass(kPass);
  driver.expect_at_rest();
}

TEST(EngineStream, WithoutCountedHoldersItWaitsInsteadOfLettingGo) {
  Bare bare(kAtOnce);
  const SaveVerdict saved = bare.engine.save(request(1, kBytes, kMain));
  const CopyId copy = bare.engine.probed(saved.storage, kFree).front().copy;
  const Commands wait = bare.engine.probed(saved.storage, {.counted = false});
  EXPECT_EQ(kinds(wait), std::vector{CommandKind::kWait});
  EXPECT_EQ(wait.front().copy, copy);
}

}  // namespace
}  // namespace ebbtide::testing
