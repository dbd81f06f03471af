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

TEST(Window, EmptyGivesNothing) {
  Window window;
  EXPECT_TRUE(window.empty());
  EXPECT_EQ(window.pop_over(0), std::nullopt);
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

TEST(Window, StorageLargerThanTheWindowLeavesAtOnce) {
  Window window;
  window.push(StorageId{1}, 5);
  window.push(StorageId{2}, 100);
  EXPECT_EQ(pop_all(window, 50), (std::vector<std::uint64_t>{1, 2}));
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

}  // namespace
}  // namespace ebbtide
