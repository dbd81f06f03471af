#include "ebbtide/extent_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ebbtide/error.h"

namespace ebbtide {
namespace {

TEST(ExtentAllocator, TakesTheSmallestFreeExtentThatFits) {
  ExtentAllocator extents(1024);
  const auto a = extents.allocate(256);
  const auto b = extents.allocate(64);
  const auto c = extents.allocate(128);
  const auto d = extents.allocate(64);
  ASSERT_TRUE(a && b && c && d);
  extents.free(*a, 256);
  extents.free(*c, 128);
  EXPECT_EQ(extents.allocate(100), c);
  EXPECT_EQ(extents.allocate(200), a);
}

TEST(ExtentAllocator, MergesFreeNeighbours) {
  ExtentAllocator extents(192);
  ASSERT_EQ(extents.allocate(64), 0u);
  ASSERT_EQ(extents.allocate(64), 64u);
  ASSERT_EQ(extents.allocate(64), 128u);
  EXPECT_EQ(extents.allocate(1), std::nullopt);
  extents.free(0, 64);
  extents.free(128, 64);
  EXPECT_EQ(extents.largest_free_bytes(), 64u);
  extents.free(64, 64);
  EXPECT_EQ(extents.largest_free_bytes(), 192u);
  EXPECT_EQ(extents.allocate(192), 0u);
}

TEST(ExtentAllocator, CountsPadding) {
  ExtentAllocator extents(4096, 512);
  EXPECT_EQ(extents.padded(0), 0u);
  EXPECT_EQ(extents.padded(1), 512u);
  EXPECT_EQ(extents.padded(512), 512u);
  ASSERT_EQ(extents.allocate(513), 0u);
  EXPECT_EQ(extents.used_bytes(), 1024u);
  EXPECT_EQ(extents.free_tail_bytes(), 3072u);
  extents.free(0, 513);
  EXPECT_EQ(extents.used_bytes(), 0u);
}

TEST(ExtentAllocator, GrowsAtTheEnd) {
  ExtentAllocator extents(0);
  EXPECT_EQ(extents.allocate(64), std::nullopt);
  extents.grow(64);
  ASSERT_EQ(extents.allocate(64), 0u);
  EXPECT_EQ(extents.free_tail_bytes(), 0u);
  extents.grow(64);
  extents.grow(64);
  EXPECT_EQ(extents.capacity(), 192u);
  EXPECT_EQ(extents.free_tail_bytes(), 128u);
  EXPECT_EQ(extents.allocate(128), 64u);
}

TEST(ExtentAllocator, HugeRequestsDoNotWrapAround) {
  ExtentAllocator extents(1024);
  for (std::uint64_t below_max = 0; below_max < 200; ++below_max) {
    EXPECT_EQ(extents.allocate(UINT64_MAX - below_max), std::nullopt);
  }
  EXPECT_EQ(extents.used_bytes(), 0u);
}

TEST(ExtentAllocator, RefusesToFreeWhatIsFree) {
  ExtentAllocator extents(1024);
  ASSERT_EQ(extents.allocate(128), 0u);
  ASSERT_EQ(extents.allocate(128), 128u);
  extents.free(0, 128);
  EXPECT_THROW(extents.free(0, 128), Error);
  EXPECT_THROW(extents.free(64, 128), Error);
  EXPECT_THROW(extents.free(128, 129), Error);
  EXPECT_THROW(extents.free(512, 64), Error);
  EXPECT_THROW(extents.free(1024, 64), Error);
  EXPECT_THROW(extents.free(130, 1), Error);
  EXPECT_THROW(extents.free(128, UINT64_MAX), Error);
  EXPECT_EQ(extents.used_bytes(), 128u);
  extents.free(128, 128);
  EXPECT_EQ(extents.largest_free_bytes(), 1024u);
}

// What is handed out, as a plain map; free extents are what lies between.
class Shadow {
 public:
  Shadow(std::uint64_t capacity, std::uint64_t alignment) : capacity_(capacity), alignment_(alignment) {}

  void check(const ExtentAllocator& extents) const {
    std::uint64_t used = 0;
    for (const auto& [offset, nbytes] : live_) used += padded(nbytes);
    const auto gaps = free_extents();
    EXPECT_EQ(extents.used_bytes(), used);
    EXPECT_EQ(extents.capacity(), capacity_);
    EXPECT_EQ(extents.largest_free_bytes(), gaps.empty() ? 0 : std::ranges::max(gaps));
    EXPECT_EQ(extents.free_tail_bytes(), capacity_ - live_end());
  }

  void allocated(std::uint64_t nbytes, std::optional<std::uint64_t> offset) {
    std::optional<std::uint64_t> best;
    for (const std::uint64_t gap : free_extents()) {
      if (gap >= padded(nbytes) && (!best || gap < *best)) best = gap;
    }
    ASSERT_EQ(offset.has_value(), best.has_value()) << nbytes << " bytes";
    if (!offset) return;
    EXPECT_EQ(*offset % alignment_, 0u);
    ASSERT_LE(*offset + padded(nbytes), capacity_);
    const auto next = live_.lower_bound(*offset);
    const std::uint64_t gap_end = next == live_.end() ? capacity_ : next->first;
    const std::uint64_t gap_begin =
        next == live_.begin() ? 0 : std::prev(next)->first + padded(std::prev(next)->second);
    ASSERT_LE(gap_begin, *offset) << "overlaps the extent before";
    ASSERT_LE(*offset + padded(nbytes), gap_end) << "overlaps the extent after";
    EXPECT_EQ(gap_end - gap_begin, *best) << "not the best fit";
    live_[*offset] = nbytes;
  }

  void grown(std::uint64_t nbytes) { capacity_ += nbytes; }
  [[nodiscard]] bool empty() const { return live_.empty(); }

  std::pair<std::uint64_t, std::uint64_t> take(std::uint64_t index) {
    const auto it = std::next(live_.begin(), static_cast<std::ptrdiff_t>(index % live_.size()));
    const std::pair<std::uint64_t, std::uint64_t> extent = *it;
    live_.erase(it);
    return extent;
  }

 private:
  [[nodiscard]] std::uint64_t padded(std::uint64_t nbytes) const {
    return (nbytes + alignment_ - 1) / alignment_ * alignment_;
  }
  [[nodiscard]] std::uint64_t live_end() const {
    return live_.empty() ? 0 : live_.rbegin()->first + padded(live_.rbegin()->second);
  }
  [[nodiscard]] std::vector<std::uint64_t> free_extents() const {
    std::vector<std::uint64_t> gaps;
    std::uint64_t end = 0;
    for (const auto& [offset, nbytes] : live_) {
      if (offset > end) gaps.push_back(offset - end);
      end = offset + padded(nbytes);
    }
    if (capacity_ > end) gaps.push_back(capacity_ - end);
    return gaps;
  }

  std::uint64_t capacity_;
  std::uint64_t alignment_;
  std::map<std::uint64_t, std::uint64_t> live_;  // offset -> nbytes as asked
};

class ExtentAllocatorRandom : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ExtentAllocatorRandom, MatchesAShadowMap) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  const std::uint64_t alignment = std::uint64_t{1} << (random() % 10);
  const std::uint64_t capacity = random() % 200 * alignment;
  ExtentAllocator extents(capacity, alignment);
  Shadow shadow(capacity, alignment);
  for (int step = 0; step < 600 && !HasFailure(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const std::uint64_t action = random() % 32;
    if (action == 0) {
      const std::uint64_t nbytes = random() % 20 * alignment;
      extents.grow(nbytes);
      shadow.grown(nbytes);
    } else if (action < 18 || shadow.empty()) {
      const std::uint64_t nbytes = 1 + random() % (random() % 8 == 0 ? 100 * alignment : 12 * alignment);
      shadow.allocated(nbytes, extents.allocate(nbytes));
    } else {
      const auto [offset, nbytes] = shadow.take(random());
      extents.free(offset, nbytes);
    }
    shadow.check(extents);
  }
  while (!shadow.empty()) {
    const auto [offset, nbytes] = shadow.take(random());
    extents.free(offset, nbytes);
  }
  shadow.check(extents);
  EXPECT_EQ(extents.largest_free_bytes(), extents.capacity());
}

INSTANTIATE_TEST_SUITE_P(Seeds, ExtentAllocatorRandom, testing::Range<std::uint64_t>(0, 40));

}  // namespace
}  // namespace ebbtide
