#include "ebbtide/window.h"

#include <gtest/gtest.h>

#include <vector>

namespace ebbtide {
namespace {

std::vector<std::uint64_t> pop_all(Window& window, std::uint64_t keep_last_bytes) {
  std::vector<std::uint64_t> left;
  while (const auto storage = window.pop_over(keep_last_bytes)) left.push_back(value(*storage));
  return left;
}

std::vector<std::uint64_t> pop_all_before(Window& window, std::uint64_t first_kept) {
  std::vector<std::uint64_t> left;
  while (const auto storage = window.pop_before(GroupId{first_kept})) left.push_back(value(*storage));
  return left;
}

TEST(Window, EmptyGivesNothing) {
  Window window;
  EXPECT_TRUE(window.empty());
  EXPECT_EQ(window.pop_over(0), std::nullopt);
  EXPECT_EQ(window.pop_before(GroupId{UINT64_MAX}), std::nullopt);
}

TEST(Window, KeepsTheTail) {
  Window window;
  for (std::uint64_t id = 1; id <= 4; ++id) window.push(StorageId{id}, 10);
  EXPECT_EQ(pop_all(window, 20), (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(window.nbytes(), 20u);
  EXPECT_EQ(pop_all(window, 20), (std::vector<std::uint64_t>{}));
}

TEST(Window, OfZeroBytesKeepsNothing) {
  Window window;
  window.push(StorageId{1}, 1);
  EXPECT_EQ(pop_all(window, 0), (std::vector<std::uint64_t>{1}));
  EXPECT_TRUE(window.empty());
}

TEST(Window, StorageLargerThanTheWindowStaysAsTheNewestAlone) {
  Window window;
  window.push(StorageId{1}, 5);
  window.push(StorageId{2}, 100);
  EXPECT_EQ(pop_all(window, 50), (std::vector<std::uint64_t>{1}));
  window.push(StorageId{3}, 5);
  EXPECT_EQ(pop_all(window, 50), (std::vector<std::uint64_t>{2}));
  EXPECT_EQ(pop_all(window, 0), (std::vector<std::uint64_t>{3})) << "nothing is to be kept";
}

TEST(Window, GrowingKeepsThePlace) {
  Window window;
  window.push(StorageId{1}, 10);
  window.push(StorageId{2}, 10);
  window.grow(StorageId{1}, 30);
  window.grow(StorageId{9}, 30);  // not inside
  EXPECT_EQ(window.nbytes(), 50u);
  EXPECT_EQ(pop_all(window, 10), (std::vector<std::uint64_t>{1}));
  EXPECT_EQ(window.nbytes(), 10u);
}

TEST(Window, RemovedCountsNoMore) {
  Window window;
  for (std::uint64_t id = 1; id <= 3; ++id) window.push(StorageId{id}, 10);
  EXPECT_TRUE(window.remove(StorageId{2}));
  EXPECT_FALSE(window.remove(StorageId{2}));
  EXPECT_EQ(window.nbytes(), 20u);
  EXPECT_EQ(pop_all(window, 0), (std::vector<std::uint64_t>{1, 3}));
}

TEST(Window, KeepsTheLastGroups) {
  Window window;
  for (std::uint64_t id = 1; id <= 6; ++id) window.push(StorageId{id}, 10, GroupId{(id + 1) / 2});
  EXPECT_EQ(pop_all_before(window, 1), (std::vector<std::uint64_t>{}));
  EXPECT_EQ(pop_all_before(window, 3), (std::vector<std::uint64_t>{1, 2, 3, 4}));
  EXPECT_EQ(window.nbytes(), 20u);
  EXPECT_EQ(pop_all_before(window, 3), (std::vector<std::uint64_t>{}));
  EXPECT_EQ(pop_all_before(window, 9), (std::vector<std::uint64_t>{5, 6}));
  EXPECT_TRUE(window.empty());
}

TEST(Window, SavedAgainInALaterGroupGoesToTheBack) {
  Window window;
  window.push(StorageId{1}, 10, GroupId{1});
  window.push(StorageId{2}, 20, GroupId{1});
  window.push(StorageId{3}, 30, GroupId{2});
  window.move_to(StorageId{1}, GroupId{2});
  window.move_to(StorageId{9}, GroupId{2});  // not inside
  window.grow(StorageId{1}, 5);
  EXPECT_EQ(window.nbytes(), 65u);
  EXPECT_EQ(pop_all_before(window, 2), (std::vector<std::uint64_t>{2}));
  EXPECT_EQ(window.nbytes(), 45u);
  EXPECT_EQ(pop_all_before(window, 3), (std::vector<std::uint64_t>{3, 1}));
  EXPECT_EQ(window.nbytes(), 0u);
}

TEST(Window, SavedAgainCountsForTheLaterGroup) {
  Window window;
  window.push(StorageId{1}, 10, GroupId{1});
  window.move_to(StorageId{1}, GroupId{2});
  EXPECT_EQ(pop_all_before(window, 2), (std::vector<std::uint64_t>{}));
  EXPECT_EQ(pop_all_before(window, 3), (std::vector<std::uint64_t>{1}));
}

TEST(Window, MovedAndRemovedIsGone) {
  Window window;
  window.push(StorageId{1}, 10, GroupId{1});
  window.push(StorageId{2}, 10, GroupId{1});
  window.move_to(StorageId{1}, GroupId{2});
  EXPECT_TRUE(window.remove(StorageId{1}));
  EXPECT_EQ(pop_all_before(window, 9), (std::vector<std::uint64_t>{2}));
  EXPECT_TRUE(window.empty());
}

}  // namespace
}  // namespace ebbtide
