// The engine as a whole: statistics, its end, reports that come too late.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "ebbtide/error.h"
#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

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
    (void)engine.completed(CopyId{1}, true, {kFree});
    EXPECT_EQ(space->used_bytes(), 64u);
  }
  EXPECT_EQ(space->used_bytes(), 0u);
}

TEST(Engine, ReportsOfTheUnknownAreIgnored) {
  Engine engine({}, std::make_shared<FakeSpace>(1 << 20));
  EXPECT_TRUE(engine.drop(TicketId{5}).empty());
  EXPECT_TRUE(engine.probed(StorageId{5}, kFree).empty());
  EXPECT_TRUE(engine.completed(CopyId{5}, true, {kFree}).empty());
  EXPECT_TRUE(engine.allocation_failed(StorageId{5}, CopyId{5}).empty());
  EXPECT_TRUE(engine.end_pass(PassId{5}).empty());
  EXPECT_TRUE(engine.gather().empty());
  EXPECT_TRUE(engine.grown(true).empty());
  EXPECT_TRUE(engine.end_group().empty());
  EXPECT_EQ(engine.blocker(CopyId{5}), CopyId{});
  EXPECT_FALSE(engine.running(CopyId{5}));
  EXPECT_TRUE(engine.wait_allocated(StorageId{5}));
  EXPECT_EQ(to_string(engine.allocated(StorageId{5}, CopyId{5}, {}, {})), "release restored storage 5 of copy 5\n")
      << "nobody uses it";
}

}  // namespace
}  // namespace ebbtide::testing
