// Restoring: where a ticket's bytes are found, and who keeps a restored storage alive.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "ebbtide/error.h"
#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

TEST(EngineRestore, UnknownTicketIsAnError) {
  Driver driver;
  const Saved saved = offloaded_storages(driver, 1).front();
  driver.drop(saved);
  try {
    (void)driver.engine.restore(saved.ticket, kPass, false, false);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("ticket 1 was dropped"), std::string::npos);
  }
}

TEST(EngineRestore, BytesThatAreNowhereAreAnError) {
  Engine engine({.keep_last_bytes = 1024}, std::make_shared<FakeSpace>(1 << 20));
  const SaveVerdict saved =
      engine.save({.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(0, 64), .epoch = EpochId{1}});
  try {
    (void)engine.restore(saved.ticket, kPass, false, false);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kDevice);
  }
}

TEST(EngineRestore, LastClaimReleasesTheRestoredStorage) {
  Driver driver;
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  ASSERT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 64u) << "kept for the other ticket";
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr) << "asked twice, claimed once";
  EXPECT_EQ(driver.device.used_bytes(), 64u);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 64u);
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineRestore, ViewsShareOneRestoredStorage) {
  Driver driver;
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  const Storage first = driver.unpack(saved[0], kPass);
  EXPECT_EQ(driver.unpack(saved[1], kPass), first);
  for (const Saved& one : saved) driver.drop(one);
}

TEST(EngineRestore, SecondUnpackOfATicketFindsTheRestoredStorage) {
  Driver driver;
  const Saved saved = offloaded_storages(driver, 1).front();
  const Storage first = driver.unpack(saved, kPass);
  EXPECT_EQ(driver.unpack(saved, kPass), first);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u) << "held by the reader only";
  driver.drop(saved);
}

TEST(EngineRestore, SecondPassOverARetainedGraphLoadsAgain) {
  Driver driver;
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  for (const PassId pass : {kPass, kNextPass}) {
    for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, pass), nullptr);
    driver.end_pass(pass);
    EXPECT_EQ(driver.device.used_bytes(), 0u);
  }
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 128u);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineRestore, EndOfThePassReleasesWhatWasNotClaimed) {
  Driver driver;
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
  driver.end_pass(kNextPass);
  EXPECT_EQ(driver.device.used_bytes(), 64u);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineRestore, DroppingTheLastUnservedTicketReleasesTheRestoredStorage) {
  Driver driver;
  const std::vector<Saved> saved = offloaded(driver, {kHalves[0], kHalves[1], bytes_view(0, 64)});
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
  driver.drop(saved[1]);
  EXPECT_EQ(driver.device.used_bytes(), 64u);
  driver.drop(saved[2]);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  driver.drop(saved[0]);
  driver.expect_at_rest();
}

TEST(EngineRestore, WithoutAPassNothingIsClaimedOrKept) {
  Driver driver({.config = {.prefetch_bytes = 128}});
  const std::vector<Saved> first = offloaded_storages(driver, 1);
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  EXPECT_NE(driver.unpack(saved[0], PassId{}), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u) << "no guess";
  driver.drop(first[0]);
  for (const Saved& one : saved) driver.drop(one);
}

TEST(EngineRestore, PendingNamesTheLoadAndWhetherItIsAllocating) {
  Bare bare;
  const TicketId ticket = bare.offload();
  const RestoreVerdict first = bare.engine.restore(ticket, kPass, false, false);
  EXPECT_EQ(first.outcome, RestoreOutcome::kLoad);
  const CopyId load = first.load;
  RestoreVerdict second = bare.engine.restore(ticket, kPass, false, false);
  EXPECT_EQ(second.outcome, RestoreOutcome::kPending);
  EXPECT_EQ(second.load, load);
  EXPECT_TRUE(second.allocating);
  EXPECT_FALSE(bare.engine.running(load));
  (void)bare.allocate(StorageId{1}, load);
  EXPECT_TRUE(bare.engine.running(load));
  second = bare.engine.restore(ticket, kPass, false, true);
  EXPECT_EQ(second.outcome, RestoreOutcome::kPending);
  EXPECT_EQ(second.load, load);
  EXPECT_FALSE(second.allocating);
  (void)bare.engine.completed(load, true, {});
  second = bare.engine.restore(ticket, kPass, false, true);
  EXPECT_EQ(second.outcome, RestoreOutcome::kShared);
  EXPECT_EQ(second.load, load);
}

TEST(EngineRestore, WaitersWakeWhenTheLoadIsAllocatedOrGivenUp) {
  for (const bool allocated : {false, true}) {
    Bare bare;
    const TicketId ticket = bare.offload();
    const CopyId load = bare.engine.restore(ticket, kPass, false, false).load;
    EXPECT_FALSE(bare.engine.wait_allocated(StorageId{1}, std::chrono::milliseconds(1)));
    std::thread waiting([&] { EXPECT_TRUE(bare.engine.wait_allocated(StorageId{1})); });
    // Widens the window in which it waits; right whether or not it does by then.
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    if (allocated) {
      (void)bare.allocate(StorageId{1}, load);
    } else {
      (void)bare.engine.allocation_failed(StorageId{1}, load);
    }
    waiting.join();
  }
}

TEST(EngineRestore, FailedLoadIsRetried) {
  Driver driver;
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  driver.fail_next_copies(1);
  EXPECT_EQ(driver.unpack(saved[0], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 0u);
  EXPECT_EQ(driver.engine.stats().tier_bytes, 64u) << "the copy is kept";
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EngineRestore, KeepsTheAddressModulo512) {
  Driver driver;
  Storage storage = driver.device.allocate(64, 192);
  write(storage, 1);
  const Saved saved = driver.pack(std::move(storage), bytes_view(8, 24), EpochId{1});
  const Storage restored = driver.unpack(saved, kPass);
  EXPECT_EQ(restored->ref.address % kAlignmentBytes, 192u);
  EXPECT_EQ(restored->ref.nbytes, 24u) << "up to the last wanted byte";
  driver.drop(saved);
}

TEST(EngineRestore, RecordsAtAllocationBeforeTheLoad) {
  Bare bare;
  const CopyId load = bare.engine.restore(bare.offload(), kPass, false, false).load;
  const Commands commands = bare.allocate(StorageId{1}, load, 64, StreamRef{5});
  ASSERT_EQ(commands.size(), 2u);
  EXPECT_EQ(commands[0].kind, CommandKind::kRecord);
  EXPECT_EQ(commands[0].stream, StreamRef{5});
  EXPECT_EQ(commands[0].storage, StorageId{1});
  EXPECT_EQ(commands[1].kind, CommandKind::kCopy);
  EXPECT_EQ(commands[1].after, std::vector{commands[0].event});
}

TEST(EngineRestore, TooSmallAStorageIsRefused) {
  Bare bare;
  const CopyId load = bare.engine.restore(bare.offload(), kPass, false, false).load;
  EXPECT_THROW((void)bare.allocate(StorageId{1}, load, 63), Error);
  (void)bare.engine.allocation_failed(StorageId{1}, load);
}

TEST(EngineRestore, BytesCopiedWhileItIsAllocatedAreNotPartOfTheLoad) {
  Bare bare({.in_flight_bytes = UINT64_MAX});
  const TicketId first = bare.offload(bytes_view(0, 16));
  SaveRequest late{.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(32, 64), .epoch = EpochId{1}};
  const TicketId second = bare.engine.save(late).ticket;
  const CopyId copy = bare.engine.probed(StorageId{1}, kFree).front().copy;
  const RestoreVerdict verdict = bare.engine.restore(first, kPass, false, false);
  EXPECT_EQ(verdict.nbytes, 16u);
  (void)bare.engine.completed(copy, true, {kFree});
  const Commands load = bare.allocate(StorageId{1}, verdict.load, 16);
  EXPECT_EQ(to_string(load.back().plan), "host:0x10000000+0 -> device:0x100000+0, 16 bytes\n");
  (void)bare.engine.completed(load.back().copy, true, {});
  EXPECT_EQ(bare.engine.stats().h2d_copies, 1u);
  EXPECT_EQ(bare.engine.stats().h2d_bytes, 16u);
  EXPECT_EQ(bare.engine.restore(second, kPass, false, true).nbytes, 64u) << "not in the restored storage";
}

TEST(EngineRestore, NewRestoredStorageTakesThePlaceOfTheOld) {
  Bare bare;
  const TicketId first = bare.offload();
  const SaveRequest again{.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(0, 32), .epoch = EpochId{1}};
  const TicketId second = bare.engine.save(again).ticket;
  const CopyId load = bare.engine.restore(first, kPass, false, false).load;
  (void)bare.allocate(StorageId{1}, load);
  EXPECT_TRUE(bare.engine.completed(load, true, {}).empty()) << "held for the second ticket";
  EXPECT_EQ(bare.engine.stats().device_bytes, 64u);
  // It was written to: the session does not offer it.
  const RestoreVerdict verdict = bare.engine.restore(second, kPass, false, false);
  EXPECT_EQ(verdict.outcome, RestoreOutcome::kLoad);
  EXPECT_EQ(to_string(verdict.commands), "release restored storage 1 of copy 2\n");
  EXPECT_EQ(bare.engine.stats().device_bytes, 0u);
  (void)bare.allocate(StorageId{1}, verdict.load, 96);
  EXPECT_EQ(bare.engine.stats().device_bytes, 96u);
  EXPECT_EQ(to_string(bare.engine.completed(verdict.load, true, {})), "release restored storage 1 of copy 3\n");
  EXPECT_EQ(bare.engine.stats().device_bytes, 0u);
}

TEST(EngineRestore, DroppedDuringItsLoadKeepsDestinationAndBlockUntilItIsDone) {
  Bare bare;
  const TicketId ticket = bare.offload();
  const CopyId load = bare.engine.restore(ticket, kPass, false, false).load;
  (void)bare.allocate(StorageId{1}, load);
  EXPECT_TRUE(bare.engine.drop(ticket).empty());
  EXPECT_EQ(bare.engine.stats().tier_bytes, 64u);
  EXPECT_EQ(bare.engine.stats().device_bytes, 64u);
  EXPECT_EQ(to_string(bare.engine.completed(load, true, {})),
            "release restored storage 1 of copy 2\n"
            "forget storage 1\n");
  EXPECT_EQ(bare.engine.stats().tier_bytes, 0u);
  EXPECT_EQ(bare.engine.stats().device_bytes, 0u);
}

TEST(EngineRestore, DroppedWhileItIsAllocatedLoadsNothing) {
  for (const bool allocated : {true, false}) {
    Bare bare;
    const TicketId ticket = bare.offload();
    const CopyId load = bare.engine.restore(ticket, kPass, false, false).load;
    EXPECT_TRUE(bare.engine.drop(ticket).empty());
    if (allocated) {
      EXPECT_EQ(to_string(bare.allocate(StorageId{1}, load)),
                "release restored storage 1 of copy 2\n"
                "forget storage 1\n");
    } else {
      EXPECT_EQ(to_string(bare.engine.allocation_failed(StorageId{1}, load)), "forget storage 1\n");
    }
    EXPECT_EQ(bare.engine.stats().entries, 0u);
    EXPECT_EQ(bare.engine.stats().tier_bytes, 0u);
  }
}

TEST(EngineRestore, DroppedDuringItsLoadIsNotOffloadedAgain) {
  Bare bare({.keep_last_bytes = 0, .in_flight_bytes = UINT64_MAX});
  const TicketId first = bare.offload(bytes_view(0, 16));
  const SaveRequest late{.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(0, 64), .epoch = EpochId{1}};
  const TicketId second = bare.engine.save(late).ticket;
  const CopyId load = bare.engine.restore(first, kPass, false, false).load;
  (void)bare.allocate(StorageId{1}, load);
  EXPECT_TRUE(bare.engine.drop(first).empty());
  EXPECT_EQ(to_string(bare.engine.drop(second)), "release lease of storage 1\n") << "its memory goes at once";
  EXPECT_TRUE(bare.engine.probed(StorageId{1}, kFree).empty());
  EXPECT_EQ(to_string(bare.engine.completed(load, true, {})),
            "release restored storage 1 of copy 2\n"
            "forget storage 1\n");
}

TEST(EngineRestore, SaveOnARestoredStorageJoinsAndCopiesNothing) {
  Driver driver;
  (void)driver.begin_epoch();
  (void)driver.begin_epoch();
  const Saved saved = offloaded_storages(driver, 1).front();
  Storage restored = driver.unpack(saved, kPass);
  const Saved same = driver.pack(restored, bytes_view(0, 64), EpochId{1}, {}, saved.counter);
  const Saved part = driver.pack(restored, bytes_view(8, 16), EpochId{2}, {}, saved.counter);
  EXPECT_EQ(same.outcome, SaveOutcome::kDuplicate);
  EXPECT_EQ(part.outcome, SaveOutcome::kJoined);
  EXPECT_EQ(part.storage, saved.storage);
  restored.reset();
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u) << "a ticket pins no memory";
  driver.drop(saved);
  EXPECT_NE(driver.unpack(part, kNextPass), nullptr);
  EXPECT_NE(driver.unpack(same, kNextPass), nullptr);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_copies, 1u);
  EXPECT_EQ(stats.h2d_copies, 2u);
  EXPECT_EQ(stats.storages, 1u);
  driver.drop(same);
  driver.drop(part);
  driver.expect_at_rest();
}

TEST(EngineRestore, SaveInALaterEpochThanTheLoadIsNew) {
  Driver driver;
  const Saved saved = offloaded(driver, {bytes_view(0, 64)}, driver.begin_epoch()).front();
  const Storage restored = driver.unpack(saved, kPass);
  restored->bytes[0] ^= 1;  // no counter sees it
  const Saved later = driver.pack(restored, bytes_view(0, 64), driver.begin_epoch(), {}, saved.counter);
  EXPECT_EQ(later.outcome, SaveOutcome::kNew);
  EXPECT_NE(driver.unpack(later, kPass), nullptr);
  driver.drop(saved);
  driver.drop(later);
}

TEST(EngineRestore, SaveOnAWrittenRestoredStorageIsNew) {
  Driver driver;
  (void)driver.begin_epoch();
  const Saved saved = offloaded_storages(driver, 1).front();
  const Storage restored = driver.unpack(saved, kPass);
  write(restored, 9, saved.counter);
  const Saved written = driver.pack(restored, bytes_view(0, 64), EpochId{1}, {}, saved.counter);
  EXPECT_EQ(written.outcome, SaveOutcome::kNew);
  driver.drop(saved);
  EXPECT_NE(driver.unpack(written, kPass), nullptr);
  driver.drop(written);
}

TEST(EngineRestore, SaveOfAnotherVersionOnARestoredStorageIsNew) {
  Bare bare;
  const EpochId epoch = bare.engine.begin_epoch();
  const CopyId load = bare.engine.restore(bare.offload(), kPass, false, false).load;
  (void)bare.allocate(StorageId{1}, load);
  SaveRequest save{.storage = {DeviceId{0}, 101, 0x100000, 64}, .view = bytes_view(0, 64), .epoch = epoch};
  EXPECT_EQ(bare.engine.save(save).outcome, SaveOutcome::kNew) << "not loaded yet";
  (void)bare.engine.end_epoch(epoch);
  (void)bare.engine.completed(load, true, {});
  EXPECT_EQ(bare.engine.save(save).outcome, SaveOutcome::kDuplicate);
  save.version = 1;
  EXPECT_EQ(bare.engine.save(save).outcome, SaveOutcome::kNew);
}

TEST(EngineRestore, TicketSavedInAPassIsNoClaimOfIt) {
  Driver driver;
  (void)driver.begin_epoch();
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  const Storage restored = driver.unpack(saved[0], kPass);
  const Saved inner = driver.pack(restored, bytes_view(0, 64), EpochId{1}, {}, saved[0].counter);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().device_bytes, 0u) << "every claim of the pass is served";
  for (const Saved& one : {saved[0], saved[1], inner}) driver.drop(one);
}

}  // namespace
}  // namespace ebbtide::testing
