// Restoring: where a ticket's bytes are found, who keeps a restored storage alive, and what is loaded ahead.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "ebbtide/error.h"
#include "engine_driver.h"

namespace ebbtide::testing {
namespace {

constexpr PassId kPass{1};
constexpr PassId kNextPass{2};
constexpr ProbeAnswer kFree{};

constexpr EngineConfig kPrefetching{.prefetch_bytes = 128};

Storage filled(Driver& driver, std::uint64_t nbytes, std::uint8_t seed = 1) {
  Storage storage = driver.device.allocate(nbytes);
  write(storage, seed);
  return storage;
}

// `views` of one offloaded storage of 64 bytes.
std::vector<Saved> offloaded(Driver& driver, const std::vector<ViewMeta>& views, EpochId epoch = EpochId{1}) {
  Storage storage = filled(driver, 64);
  std::vector<Saved> saved;
  for (const ViewMeta& view : views) {
    saved.push_back(&view == &views.back() ? driver.pack(std::move(storage), view, epoch)
                                           : driver.pack(storage, view, epoch));
  }
  driver.end_epoch(EpochId{});
  driver.complete_all();
  return saved;
}

std::vector<Saved> offloaded_storages(Driver& driver, int count) {
  std::vector<Saved> saved;
  for (int i = 0; i < count; ++i) saved.push_back(offloaded(driver, {bytes_view(0, 64)}).front());
  return saved;
}

const std::vector<ViewMeta> kHalves = {bytes_view(0, 32), bytes_view(32, 64)};

// An engine without a driver: each storage of 64 bytes is saved and offloaded.
struct Bare {
  explicit Bare(const EngineConfig& config = {}) : engine(config, std::make_shared<FakeSpace>(1 << 20)) {}

  TicketId offload(const ViewMeta& view = bytes_view(0, 64)) {
    const std::uint64_t n = ++saved;
    const SaveVerdict verdict =
        engine.save({.storage = {DeviceId{0}, n, 0x1000 * n, 64}, .view = view, .epoch = EpochId{1}});
    for (const Command& command : engine.probed(verdict.storage, kFree)) {
      if (command.kind == CommandKind::kCopy) (void)engine.completed(command.copy, true, kFree);
    }
    return verdict.ticket;
  }
  // Starts the load and returns its copy.
  CopyId allocate(std::uint64_t storage, std::uint64_t nbytes = 64) {
    const StorageRef restored{DeviceId{0}, 100 + storage, 0x100000 * storage, nbytes};
    return engine.allocated(StorageId{storage}, restored, {}).back().copy;
  }

  Engine engine;
  std::uint64_t saved = 0;
};

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
  Driver driver({.config = kPrefetching});
  const std::vector<Saved> first = offloaded_storages(driver, 1);
  const std::vector<Saved> saved = offloaded(driver, kHalves);
  EXPECT_NE(driver.unpack(saved[0], PassId{}), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u) << "no guess";
  driver.drop(first[0]);
  for (const Saved& one : saved) driver.drop(one);
}

TEST(EngineRestore, PendingNamesTheCopyOnceItRuns) {
  Bare bare;
  const TicketId ticket = bare.offload();
  EXPECT_EQ(bare.engine.restore(ticket, kPass, false, false).outcome, RestoreOutcome::kLoad);
  RestoreVerdict second = bare.engine.restore(ticket, kPass, false, false);
  EXPECT_EQ(second.outcome, RestoreOutcome::kPending);
  EXPECT_EQ(second.load, CopyId{});
  const CopyId load = bare.allocate(1);
  second = bare.engine.restore(ticket, kPass, false, true);
  EXPECT_EQ(second.outcome, RestoreOutcome::kPending);
  EXPECT_EQ(second.load, load);
  (void)bare.engine.completed(load, true, {});
  second = bare.engine.restore(ticket, kPass, false, true);
  EXPECT_EQ(second.outcome, RestoreOutcome::kShared);
  EXPECT_EQ(second.load, load);
}

TEST(EngineRestore, WaitersWakeWhenTheLoadIsAllocatedDoneOrFailed) {
  Bare bare;
  const TicketId ticket = bare.offload();
  for (const bool ok : {false, true}) {
    ASSERT_EQ(bare.engine.restore(ticket, kPass, false, false).outcome, RestoreOutcome::kLoad);
    std::thread allocated([&] { bare.engine.wait_allocated(StorageId{1}); });
    std::thread loaded([&] { bare.engine.wait_loaded(StorageId{1}); });
    // Widens the window in which they wait; right whether or not they do by then.
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const CopyId load = bare.allocate(1);
    allocated.join();  // the load is not done yet
    (void)bare.engine.completed(load, ok, {});
    loaded.join();
  }
  ASSERT_EQ(bare.engine.restore(ticket, kNextPass, false, false).outcome, RestoreOutcome::kLoad);
  std::thread waiting([&] { bare.engine.wait_loaded(StorageId{1}); });
  (void)bare.engine.allocation_failed(StorageId{1});
  waiting.join();
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
  (void)bare.engine.restore(bare.offload(), kPass, false, false);
  const Commands commands = bare.engine.allocated(StorageId{1}, {DeviceId{0}, 9, 0x9000, 64}, StreamRef{5});
  ASSERT_EQ(commands.size(), 2u);
  EXPECT_EQ(commands[0].kind, CommandKind::kRecord);
  EXPECT_EQ(commands[0].stream, StreamRef{5});
  EXPECT_EQ(commands[0].storage, StorageId{1});
  EXPECT_EQ(commands[1].kind, CommandKind::kCopy);
  EXPECT_EQ(commands[1].after, std::vector{commands[0].event});
}

TEST(EngineRestore, TooSmallAStorageIsRefused) {
  Bare bare;
  (void)bare.engine.restore(bare.offload(), kPass, false, false);
  EXPECT_THROW(bare.allocate(1, 63), Error);
  (void)bare.engine.allocation_failed(StorageId{1});
}

TEST(EngineRestore, BytesCopiedWhileItIsAllocatedAreNotPartOfTheLoad) {
  Bare bare({.in_flight_bytes = UINT64_MAX});
  const TicketId first = bare.offload(bytes_view(0, 16));
  SaveRequest late{.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(32, 64), .epoch = EpochId{1}};
  const TicketId second = bare.engine.save(late).ticket;
  const CopyId copy = bare.engine.probed(StorageId{1}, kFree).front().copy;
  EXPECT_EQ(bare.engine.restore(first, kPass, false, false).nbytes, 16u);
  (void)bare.engine.completed(copy, true, kFree);
  const Commands load = bare.engine.allocated(StorageId{1}, {DeviceId{0}, 9, 0x9000, 16}, {});
  EXPECT_EQ(to_string(load.back().plan), "host:0x10000000+0 -> device:0x9000+0, 16 bytes\n");
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
  (void)bare.engine.restore(first, kPass, false, false);
  const CopyId load = bare.allocate(1);
  EXPECT_TRUE(bare.engine.completed(load, true, {}).empty()) << "held for the second ticket";
  // It was written to: the session does not offer it.
  const RestoreVerdict verdict = bare.engine.restore(second, kPass, false, false);
  EXPECT_EQ(verdict.outcome, RestoreOutcome::kLoad);
  EXPECT_TRUE(verdict.commands.empty()) << "a release here would hit the new storage";
  EXPECT_EQ(bare.engine.stats().device_bytes, 64u);
  const CopyId reload = bare.allocate(1, 96);
  EXPECT_EQ(bare.engine.stats().device_bytes, 96u);
  EXPECT_EQ(to_string(bare.engine.completed(reload, true, {})), "release restored storage 1 of copy 3\n");
  EXPECT_EQ(bare.engine.stats().device_bytes, 0u);
}

TEST(EngineRestore, DroppedDuringItsLoadKeepsDestinationAndBlockUntilItIsDone) {
  Bare bare;
  const TicketId ticket = bare.offload();
  (void)bare.engine.restore(ticket, kPass, false, false);
  const CopyId load = bare.allocate(1);
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
    (void)bare.engine.restore(ticket, kPass, false, false);
    EXPECT_TRUE(bare.engine.drop(ticket).empty());
    EXPECT_EQ(to_string(allocated ? bare.engine.allocated(StorageId{1}, {DeviceId{0}, 9, 0x9000, 64}, {})
                                  : bare.engine.allocation_failed(StorageId{1})),
              "forget storage 1\n");
    EXPECT_EQ(bare.engine.stats().entries, 0u);
    EXPECT_EQ(bare.engine.stats().tier_bytes, 0u);
  }
}

TEST(EngineRestore, DroppedDuringItsLoadIsNotOffloadedAgain) {
  Bare bare({.keep_last_bytes = 0, .in_flight_bytes = UINT64_MAX});
  const TicketId first = bare.offload(bytes_view(0, 16));
  const SaveRequest late{.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(0, 64), .epoch = EpochId{1}};
  const TicketId second = bare.engine.save(late).ticket;
  (void)bare.engine.restore(first, kPass, false, false);
  const CopyId load = bare.allocate(1);
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
  (void)bare.engine.restore(bare.offload(), kPass, false, false);
  const CopyId load = bare.allocate(1);
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

TEST(EnginePrefetch, LoadsWhatWasPackedBeforeInReverseUpToTheBound) {
  Bare bare(kPrefetching);
  std::vector<TicketId> tickets;
  for (int i = 0; i < 5; ++i) tickets.push_back(bare.offload());
  const RestoreVerdict last = bare.engine.restore(tickets[4], kPass, false, false);
  EXPECT_EQ(to_string(last.commands),
            "alloc 64 bytes at 0 for storage 4\n"
            "alloc 64 bytes at 0 for storage 3\n");
  (void)bare.engine.completed(bare.allocate(5), true, {});
  const CopyId fourth = bare.allocate(4);
  const CopyId third = bare.allocate(3);
  EXPECT_TRUE(bare.engine.completed(third, true, {}).empty()) << "loaded and not asked for counts too";
  EXPECT_EQ(bare.engine.restore(tickets[3], kPass, false, true).outcome, RestoreOutcome::kPending);
  (void)bare.engine.completed(fourth, true, {});
  const RestoreVerdict next = bare.engine.restore(tickets[3], kPass, false, true);
  EXPECT_EQ(next.outcome, RestoreOutcome::kShared);
  EXPECT_EQ(to_string(next.commands),
            "release restored storage 4 of copy 7\n"
            "alloc 64 bytes at 0 for storage 2\n");
  const Stats stats = bare.engine.stats();
  EXPECT_EQ(stats.prefetch_hits, 1u);
  EXPECT_EQ(stats.prefetch_misses, 1u);
}

TEST(EnginePrefetch, WholeBackwardLoadsEachByteOnce) {
  Driver driver({.config = kPrefetching});
  const std::vector<Saved> saved = offloaded_storages(driver, 12);
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    EXPECT_NE(driver.unpack(*one, kPass), nullptr);
    EXPECT_LE(driver.device.used_bytes(), 64u + 128u);
    driver.drop(*one);
  }
  driver.end_pass(kPass);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.h2d_copies, 12u);
  EXPECT_EQ(stats.prefetch_hits, 11u);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, OfAnotherEpochOrALeasedOneOrTheServedIsNotDone) {
  Driver driver({.config = {.prefetch_bytes = 1 << 20}});
  const Saved other = offloaded(driver, {bytes_view(0, 64)}, EpochId{2}).front();
  const Storage held = filled(driver, 64);
  const Saved leased = driver.pack(held, bytes_view(0, 64), EpochId{1});
  const std::vector<Saved> saved = offloaded_storages(driver, 2);
  EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 2u);
  for (const Saved& one : {other, leased, saved[0], saved[1]}) driver.drop(one);
}

TEST(EnginePrefetch, BoundIsPerDevice) {
  Bare bare({.prefetch_bytes = 64});
  std::vector<TicketId> tickets;
  for (std::uint64_t n = 1; n <= 5; ++n) {
    const StorageRef source{DeviceId{static_cast<std::int64_t>(n % 2)}, n, 0x1000 * n, 64};
    const SaveVerdict saved = bare.engine.save({.storage = source, .view = bytes_view(0, 64), .epoch = EpochId{1}});
    (void)bare.engine.completed(bare.engine.probed(saved.storage, kFree).front().copy, true, kFree);
    tickets.push_back(saved.ticket);
  }
  EXPECT_EQ(to_string(bare.engine.restore(tickets[4], kPass, false, false).commands),
            "alloc 64 bytes at 0 for storage 4\n"
            "alloc 64 bytes at 0 for storage 3\n");
}

TEST(EnginePrefetch, GuessesAreDroppedAtTheEndOfThePass) {
  Driver driver({.config = kPrefetching});
  const std::vector<Saved> saved = offloaded_storages(driver, 3);
  EXPECT_NE(driver.unpack(saved[2], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 128u);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_NE(driver.unpack(saved[2], kNextPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 128u) << "their bytes are free to guess with again";
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, GuessThatIsLoadingWhenThePassEndsIsDroppedWhenDone) {
  Driver driver({.config = kPrefetching, .hold_copies = true});
  const std::vector<Saved> saved = offloaded_storages(driver, 2);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 64u) << "a copy writes to it";
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, FailedAllocationForATicketReleasesGuessesAndIsRetried) {
  for (const bool hold_copies : {false, true}) {
    Driver driver({.config = kPrefetching, .device_capacity = 64 * 3, .hold_copies = hold_copies});
    const std::vector<Saved> saved = offloaded_storages(driver, 4);
    EXPECT_NE(driver.unpack(saved[3], kPass), nullptr);
    const Storage other = driver.device.allocate(64);
    ASSERT_EQ(driver.device.used_bytes(), 64u * 3) << "full of guesses";
    EXPECT_NE(driver.unpack(saved[0], kPass), nullptr);
    for (const Saved& one : saved) driver.drop(one);
  }
}

TEST(EnginePrefetch, FailedAllocationReleasesWhatIsHeldForOtherTickets) {
  Driver driver({.device_capacity = 96});
  const std::vector<Saved> views = offloaded(driver, kHalves);
  const Saved other = offloaded_storages(driver, 1).front();
  EXPECT_NE(driver.unpack(views[0], kPass), nullptr);
  EXPECT_NE(driver.unpack(other, kPass), nullptr);
  EXPECT_NE(driver.unpack(views[1], kPass), nullptr);
  for (const Saved& one : {views[0], views[1], other}) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, FailedGuessIsOnlyCancelled) {
  Driver driver({.config = {.prefetch_bytes = 1 << 20}, .device_capacity = 64 * 3});
  const std::vector<Saved> saved = offloaded_storages(driver, 5);
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    EXPECT_NE(driver.unpack(*one, kPass), nullptr);
    driver.drop(*one);
  }
  EXPECT_EQ(driver.engine.stats().h2d_copies, 5u) << "no guess that worked was loaded twice";
  driver.end_pass(kPass);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, GuessThatSomebodyWaitsForIsKeptWhenMemoryIsShort) {
  Bare bare(kPrefetching);
  const TicketId wanted = bare.offload();
  const TicketId other = bare.offload();
  const TicketId last = bare.offload();
  (void)bare.engine.restore(last, kPass, false, false);
  const CopyId guess = bare.allocate(1);
  (void)bare.allocate(2);
  const Commands short_of_memory = bare.engine.allocation_failed(StorageId{3});
  EXPECT_EQ(to_string(short_of_memory), "wait copy 4\nwait copy 5\n");
  EXPECT_EQ(bare.engine.restore(wanted, kPass, false, true).outcome, RestoreOutcome::kPending);
  EXPECT_TRUE(bare.engine.completed(guess, true, {}).empty());
  EXPECT_EQ(to_string(bare.engine.completed(CopyId{5}, true, {})), "release restored storage 2 of copy 5\n");
  EXPECT_EQ(bare.engine.restore(wanted, kPass, false, true).outcome, RestoreOutcome::kShared);
  EXPECT_EQ(bare.engine.restore(other, kPass, false, false).outcome, RestoreOutcome::kLoad);
}

TEST(EnginePrefetch, DroppedGuessGivesItsBudgetBack) {
  Driver driver({.config = kPrefetching});
  std::vector<Saved> saved = offloaded_storages(driver, 5);
  EXPECT_NE(driver.unpack(saved[4], kPass), nullptr);
  driver.drop(saved[3]);
  driver.drop(saved[2]);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  EXPECT_NE(driver.unpack(saved[4], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 128u);
  for (const int i : {0, 1, 4}) driver.drop(saved[i]);
  driver.expect_at_rest();
}

}  // namespace
}  // namespace ebbtide::testing
