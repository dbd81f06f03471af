// What is loaded ahead of being asked for, and when it is let go.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

constexpr EngineConfig kPrefetching{.prefetch_bytes = 128};

TEST(EnginePrefetch, LoadsWhatWasPackedBeforeInReverseUpToTheBound) {
  Bare bare(kPrefetching);
  std::vector<TicketId> tickets;
  for (int i = 0; i < 5; ++i) tickets.push_back(bare.offload());
  const RestoreVerdict last = bare.engine.restore(tickets[4], kPass, false, false);
  EXPECT_EQ(to_string(last.commands),
            "alloc 64 bytes at 0 for storage 4, copy 7\n"
            "alloc 64 bytes at 0 for storage 3, copy 8\n");
  const CopyId fourth{7};
  const CopyId third{8};
  (void)bare.allocate(StorageId{5}, last.load);
  (void)bare.engine.completed(last.load, true, {});
  (void)bare.allocate(StorageId{4}, fourth);
  (void)bare.allocate(StorageId{3}, third);
  EXPECT_TRUE(bare.engine.completed(third, true, {}).empty()) << "loaded and not asked for counts too";
  EXPECT_EQ(bare.engine.restore(tickets[3], kPass, false, true).outcome, RestoreOutcome::kPending);
  (void)bare.engine.completed(fourth, true, {});
  const RestoreVerdict next = bare.engine.restore(tickets[3], kPass, false, true);
  EXPECT_EQ(next.outcome, RestoreOutcome::kShared);
  EXPECT_EQ(to_string(next.commands),
            "release restored storage 4 of copy 7\n"
            "alloc 64 bytes at 0 for storage 2, copy 9\n");
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
    (void)bare.engine.completed(bare.engine.probed(saved.storage, kFree).front().copy, true, {kFree});
    tickets.push_back(saved.ticket);
  }
  EXPECT_EQ(to_string(bare.engine.restore(tickets[4], kPass, false, false).commands),
            "alloc 64 bytes at 0 for storage 4, copy 7\n"
            "alloc 64 bytes at 0 for storage 3, copy 8\n");
}

TEST(EnginePrefetch, GuessesThatNobodyAskedForAreTheNextPassesAndGoWithTheirTickets) {
  Driver driver({.config = kPrefetching});
  const std::vector<Saved> saved = offloaded_storages(driver, 3);
  EXPECT_NE(driver.unpack(saved[2], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 128u);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 128u) << "as many as may be guessed";
  const std::uint64_t loaded = driver.engine.stats().h2d_bytes;
  EXPECT_NE(driver.unpack(saved[1], kNextPass), nullptr);
  EXPECT_NE(driver.unpack(saved[0], kNextPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, loaded) << "nothing came twice";
  driver.end_pass(kNextPass);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, TheEndOfThePassLetsGoOfWhatWasKeptForTicketsThatItDidNotAskFor) {
  Driver driver({.config = {.prefetch_bytes = 0}});
  const std::vector<Saved> views = offloaded(driver, kHalves);
  EXPECT_NE(driver.unpack(views[0], kPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 64u) << "for the other view";
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : views) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, GuessesOfAPassThatIsOverMakeRoomForThoseOfAnotherForward) {
  for (const std::optional<std::uint64_t> groups : {std::optional<std::uint64_t>{1}, std::optional<std::uint64_t>{}}) {
    Driver driver({.config = {.prefetch_bytes = 192, .prefetch_groups = groups}});
    std::vector<Saved> saved = offloaded_storages(driver, 4);
    for (int i = 0; i < 4; ++i) saved.push_back(offloaded(driver, {bytes_view(0, 64)}, EpochId{2}).front());
    EXPECT_NE(driver.unpack(saved[7], kPass), nullptr);
    driver.end_pass(kPass);
    EXPECT_GE(driver.device.used_bytes(), 128u) << "guesses of the second forward";
    EXPECT_NE(driver.unpack(saved[3], kNextPass), nullptr);
    const std::uint64_t h2d_bytes = driver.engine.stats().h2d_bytes;
    EXPECT_NE(driver.unpack(saved[2], kNextPass), nullptr);
    EXPECT_NE(driver.unpack(saved[1], kNextPass), nullptr);
    EXPECT_EQ(driver.engine.stats().prefetch_misses, 2u);
    EXPECT_LE(driver.engine.stats().h2d_bytes - h2d_bytes, 64u) << "they were there";
    driver.end_pass(kNextPass);
    for (const Saved& one : saved) driver.drop(one);
    driver.expect_at_rest();
  }
}

TEST(EnginePrefetch, GuessesOfAPassThatIsOverMakeRoomForThoseOfAnother) {
  Driver driver({.config = kPrefetching});
  const std::vector<Saved> saved = offloaded_storages(driver, 5);
  EXPECT_NE(driver.unpack(saved[4], kPass), nullptr);
  driver.end_pass(kPass);
  for (const std::size_t n : {3, 2}) driver.drop(saved[n]);
  EXPECT_EQ(driver.device.used_bytes(), 0u) << "gone with their tickets";
  EXPECT_NE(driver.unpack(saved[4], kNextPass), nullptr);
  EXPECT_EQ(driver.device.used_bytes(), 128u);
  driver.end_pass(kNextPass);
  for (const std::size_t n : {0, 1, 4}) driver.drop(saved[n]);
  driver.expect_at_rest();
}

TEST(EnginePrefetch, GuessThatIsLoadingWhenThePassEndsGoesWithItsTicket) {
  Driver driver({.config = kPrefetching, .hold_copies = true});
  const std::vector<Saved> saved = offloaded_storages(driver, 2);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  driver.end_pass(kPass);
  EXPECT_EQ(driver.device.used_bytes(), 64u) << "a copy writes to it";
  for (const Saved& one : saved) driver.drop(one);
  EXPECT_EQ(driver.device.used_bytes(), 64u) << "a copy still writes to it";
  driver.complete_all();
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
  const CopyId load = bare.engine.restore(last, kPass, false, false).load;
  const CopyId guess{6};
  const CopyId other_guess{5};
  (void)bare.allocate(StorageId{1}, guess);
  (void)bare.allocate(StorageId{2}, other_guess);
  const Commands short_of_memory = bare.engine.allocation_failed(StorageId{3}, load);
  EXPECT_EQ(to_string(short_of_memory), "wait copy 6\nwait copy 5\n");
  EXPECT_EQ(bare.engine.restore(wanted, kPass, false, true).outcome, RestoreOutcome::kPending);
  EXPECT_TRUE(bare.engine.completed(guess, true, {}).empty());
  EXPECT_EQ(to_string(bare.engine.completed(other_guess, true, {})), "release restored storage 2 of copy 5\n");
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
