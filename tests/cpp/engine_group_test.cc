// Groups: when their storages are copied, what of them is loaded together, and what is counted for them.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

struct Group {
  std::vector<Saved> saved;
};

class EngineGroup : public ::testing::Test {
 protected:
  // A group of `count` storages of 64 bytes that nobody else holds.
  static Group save_group(Driver& driver, EpochId epoch, std::size_t label, int count = 2) {
    Group group;
    driver.begin_group(epoch, label);
    for (int i = 0; i < count; ++i) {
      const auto seed = static_cast<std::uint8_t>(16 * label + static_cast<std::size_t>(i));
      group.saved.push_back(driver.pack(filled(driver, 64, seed), bytes_view(0, 64), epoch, {}, nullptr, label));
    }
    driver.end_group();
    return group;
  }

  static void backward(Driver& driver, std::vector<Group> groups, PassId pass = kPass) {
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      for (auto one = group->saved.rbegin(); one != group->saved.rend(); ++one) {
        EXPECT_NE(driver.unpack(*one, pass), nullptr);
        driver.drop(*one);
      }
    }
    driver.end_pass(pass);
  }
};

TEST_F(EngineGroup, TheLastSoManyGroupsAreNotCopied) {
  for (const std::uint64_t kept : {0u, 1u, 2u}) {
    Driver driver({.config = {.keep_last_groups = kept}});
    const EpochId epoch = driver.begin_epoch();
    std::vector<Group> groups;
    for (std::uint64_t ended = 1; ended <= 4; ++ended) {
      groups.push_back(save_group(driver, epoch, ended));
      EXPECT_EQ(driver.engine.stats().d2h_copies, ended > kept ? 2 * (ended - kept) : 0) << kept << " kept";
    }
    driver.end_epoch(epoch);
    EXPECT_EQ(driver.device.used_bytes(), 128 * kept);
    backward(driver, groups);
    const Stats stats = driver.engine.stats();
    EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kLast)], 2 * kept);
    EXPECT_EQ(stats.live_hits, 2 * kept);
    driver.expect_at_rest();
  }
}

TEST_F(EngineGroup, TheLastTwoStoragesOfAGroupThatEndedAreHeldForTheirLaterViews) {
  Driver driver({.config = {.keep_last_groups = 0, .keep_last_storages = 8}});
  const EpochId epoch = driver.begin_epoch();
  const Group group = save_group(driver, epoch, 1, 5);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 3u);
  driver.begin_group(epoch, 2);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 3u);
  driver.end_group();
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 5u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  backward(driver, {group});
}

TEST_F(EngineGroup, AGroupThatRunsIsNotCopied) {
  Driver driver({.config = {.keep_last_groups = 0}});
  const EpochId epoch = driver.begin_epoch();
  driver.begin_group(epoch, 1);
  const Saved first = driver.pack(filled(driver, 64), bytes_view(0, 64), epoch);
  const Saved second = driver.pack(filled(driver, 64), bytes_view(0, 64), epoch);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 0u);
  driver.end_group();
  EXPECT_EQ(driver.engine.stats().d2h_copies, 2u);
  driver.drop(first);
  driver.drop(second);
  driver.expect_at_rest();
}

TEST_F(EngineGroup, BeforeTheFirstGroupBytesAreCounted) {
  Driver driver({.config = {.keep_last_bytes = 64, .keep_last_groups = 1}});
  const EpochId epoch = driver.begin_epoch();
  const Saved first = driver.pack(filled(driver, 64), bytes_view(0, 64), epoch);
  const Saved second = driver.pack(filled(driver, 64), bytes_view(0, 64), epoch);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 1u);
  const Group group = save_group(driver, epoch, 1);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 2u) << "saved before the group that is kept";
  driver.drop(first);
  driver.drop(second);
  backward(driver, {group});
  driver.expect_at_rest();
}

TEST_F(EngineGroup, ANewForwardMovesOutTheGroupThatTheLastOneKept) {
  Driver driver({.config = {.keep_last_groups = 1}});
  const EpochId first = driver.begin_epoch();
  const Group kept = save_group(driver, first, 1);
  driver.end_epoch(first);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 0u);
  const EpochId second = driver.begin_epoch();
  const Group next = save_group(driver, second, 1);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 2u);
  backward(driver, {kept});
  backward(driver, {next}, kNextPass);
  driver.expect_at_rest();
}

TEST_F(EngineGroup, AStorageOfTwoGroupsIsCopiedOnceWithTheLast) {
  Driver driver({.config = {.keep_last_groups = 2}});
  const EpochId epoch = driver.begin_epoch();
  Storage shared = filled(driver, 32, 9);
  driver.begin_group(epoch, 1);
  const Saved first = driver.pack(shared, bytes_view(0, 32), epoch);
  driver.end_group();
  driver.begin_group(epoch, 2);
  const Saved second = driver.pack(std::move(shared), bytes_view(8, 32), epoch);
  driver.end_group();
  std::vector<Group> groups = {save_group(driver, epoch, 3)};
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 0u) << "its first group alone has left the window";
  groups.push_back(save_group(driver, epoch, 4));
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 32u);
  driver.end_epoch(epoch);
  backward(driver, groups);
  EXPECT_NE(driver.unpack(second, kNextPass), nullptr);
  EXPECT_NE(driver.unpack(first, kNextPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 32u);
  driver.drop(first);
  driver.drop(second);
  driver.expect_at_rest();
}

TEST_F(EngineGroup, TheRestOfTheGroupAndTheGroupsBeforeAreLoadedAhead) {
  for (const std::uint64_t before : {0u, 1u, 2u}) {
    for (const std::size_t asked : {0u, 1u, 2u}) {
      Driver driver({.config = {.keep_last_groups = 0, .prefetch_bytes = 0, .prefetch_groups = before}});
      const EpochId epoch = driver.begin_epoch();
      std::vector<Group> groups;
      for (std::size_t label = 1; label <= 4; ++label) groups.push_back(save_group(driver, epoch, label, 3));
      driver.end_epoch(epoch);
      EXPECT_NE(driver.unpack(groups[3].saved[asked], kPass), nullptr);
      EXPECT_EQ(driver.engine.stats().h2d_copies, 3 * (1 + before)) << "whichever of the group is asked for first";
      EXPECT_NE(driver.unpack(groups[2].saved[2], kPass), nullptr);
      EXPECT_EQ(driver.engine.stats().h2d_copies, 3 * (2 + before));
      driver.drop(groups[3].saved[asked]);
      driver.drop(groups[2].saved[2]);
      groups[3].saved.erase(groups[3].saved.begin() + static_cast<std::ptrdiff_t>(asked));
      groups[2].saved.pop_back();
      backward(driver, groups);
      EXPECT_EQ(driver.engine.stats().h2d_copies, 12u);
      driver.expect_at_rest();
    }
  }
}

TEST_F(EngineGroup, AStorageOfTwoGroupsIsLoadedAheadWithTheLast) {
  Driver driver({.config = {.keep_last_groups = 0, .prefetch_groups = 0}, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  Storage shared = filled(driver, 32, 9);
  driver.begin_group(epoch, 1);
  const Saved first = driver.pack(shared, bytes_view(0, 32), epoch);
  const Saved other = driver.pack(filled(driver, 16), bytes_view(0, 16), epoch);
  driver.end_group();
  driver.begin_group(epoch, 2);
  const Saved second = driver.pack(std::move(shared), bytes_view(0, 32), epoch);
  const Saved last = driver.pack(filled(driver, 16), bytes_view(0, 16), epoch);
  driver.end_group();
  driver.end_epoch(epoch);
  driver.complete_all();
  EXPECT_NE(driver.unpack(last, kPass), nullptr);
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().h2d_bytes, 16u + 32u);
  for (const Saved& one : {first, other, second, last}) driver.drop(one);
  driver.complete_all();
  driver.expect_at_rest();
}

TEST_F(EngineGroup, AnotherForwardIsNotLoadedAhead) {
  Driver driver({.config = {.keep_last_groups = 0, .prefetch_groups = 8}});
  std::vector<Group> groups;
  for (int forward = 0; forward < 3; ++forward) {
    const EpochId epoch = driver.begin_epoch();
    groups.push_back(save_group(driver, epoch, 1));
    driver.end_epoch(epoch);
  }
  EXPECT_NE(driver.unpack(groups[1].saved[1], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 2u);
  backward(driver, groups);
  driver.expect_at_rest();
}

TEST_F(EngineGroup, MicroBatchesOfOneEpochAreLoadedAsTheirBackwardsCome) {
  Driver driver({.config = {.keep_last_groups = 0, .prefetch_groups = 1}});
  const EpochId epoch = driver.begin_epoch();
  std::vector<Group> first;
  std::vector<Group> second;
  for (std::size_t label = 1; label <= 3; ++label) first.push_back(save_group(driver, epoch, label));
  for (std::size_t label = 1; label <= 3; ++label) second.push_back(save_group(driver, epoch, label));
  EXPECT_NE(driver.unpack(first[2].saved[0], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 4u) << "nothing of the second";
  driver.drop(first[2].saved[0]);
  first[2].saved.erase(first[2].saved.begin());
  backward(driver, first);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 6u);
  EXPECT_NE(driver.unpack(second[2].saved[1], kNextPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 10u);
  driver.drop(second[2].saved[1]);
  second[2].saved.pop_back();
  backward(driver, second, kNextPass);
  EXPECT_EQ(driver.engine.stats().prefetch_misses, 2u);
  driver.expect_at_rest();
}

TEST_F(EngineGroup, StatisticsByLabelAddUpToTheTotals) {
  Driver driver({.config = {.keep_last_groups = 1, .prefetch_groups = 1}});
  std::vector<Saved> outside;
  for (int step = 0; step < 2; ++step) {
    const EpochId epoch = driver.begin_epoch();
    outside.push_back(driver.pack(filled(driver, 48), bytes_view(0, 48), epoch));
    std::vector<Group> groups;
    for (std::size_t label = 1; label <= 3; ++label) groups.push_back(save_group(driver, epoch, label));
    driver.end_epoch(epoch);
    backward(driver, groups, PassId{static_cast<std::uint64_t>(step) + 1});
  }
  for (const Saved& one : outside) EXPECT_NE(driver.unpack(one, PassId{9}), nullptr);
  const Stats stats = driver.engine.stats();
  const std::vector<GroupStats> groups = driver.engine.group_stats();
  const auto sum = [&](std::uint64_t GroupStats::*of) {
    return std::accumulate(groups.begin(), groups.end(), std::uint64_t{0},
                           [of](std::uint64_t total, const GroupStats& group) { return total + group.*of; });
  };
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_EQ(groups[1].runs, 2u);
  EXPECT_EQ(groups[1].d2h_bytes, 2 * 128u);
  EXPECT_EQ(groups[3].d2h_bytes, 0u);
  EXPECT_EQ(groups[0].unique_bytes, 2 * 48u);
  EXPECT_EQ(sum(&GroupStats::runs), 6u);
  EXPECT_EQ(sum(&GroupStats::storages), stats.storages);
  EXPECT_EQ(sum(&GroupStats::unique_bytes), stats.unique_bytes);
  EXPECT_EQ(sum(&GroupStats::d2h_bytes), stats.d2h_bytes);
  EXPECT_EQ(sum(&GroupStats::h2d_bytes), stats.h2d_bytes);
  EXPECT_EQ(sum(&GroupStats::prefetch_misses), stats.prefetch_misses);
  driver.engine.reset_stats();
  EXPECT_EQ(driver.engine.group_stats()[1].d2h_bytes, 0u);
  for (const Saved& one : outside) driver.drop(one);
  driver.expect_at_rest();
}

}  // namespace
}  // namespace ebbtide::testing
