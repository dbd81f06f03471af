#include "ebbtide/byte_ranges.h"

#include <gtest/gtest.h>

#include <bitset>
#include <cstdint>
#include <random>
#include <string>

namespace ebbtide {
namespace {

constexpr std::uint64_t kBytes = 96;
using Bitmap = std::bitset<kBytes>;

Bitmap bitmap_of(ByteRange range) {
  Bitmap bits;
  for (std::uint64_t i = range.begin; i < range.end; ++i) bits.set(i);
  return bits;
}

Bitmap bitmap_of(const ByteRanges& ranges) {
  Bitmap bits;
  for (const ByteRange& range : ranges.ranges()) bits |= bitmap_of(range);
  return bits;
}

// Inverted ranges come up too: they are empty.
ByteRange random_range(std::mt19937_64& random) { return {random() % kBytes, random() % kBytes}; }

void expect_canonical(const ByteRanges& set) {
  const auto& ranges = set.ranges();
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_FALSE(ranges[i].empty()) << to_string(set);
    if (i > 0) {
      EXPECT_LT(ranges[i - 1].end, ranges[i].begin) << to_string(set);
    }
  }
}

TEST(ByteRanges, StartsEmpty) {
  const ByteRanges set;
  EXPECT_TRUE(set.empty());
  EXPECT_EQ(set.nbytes(), 0u);
  EXPECT_EQ(set.span(), (ByteRange{0, 0}));
  EXPECT_EQ(to_string(set), "{}");
}

TEST(ByteRanges, MergesRangesThatTouch) {
  EXPECT_EQ((ByteRanges{{0, 8}, {16, 24}, {8, 16}}), (ByteRanges{{0, 24}}));
  EXPECT_EQ(to_string(ByteRanges{{32, 40}, {0, 16}}), "{[0, 16), [32, 40)}");
}

TEST(ByteRanges, IgnoresEmptyRanges) {
  ByteRanges set{{0, 8}, {4, 4}, {20, 12}};
  set.subtract({6, 2});
  set.subtract({4, 4});
  EXPECT_EQ(set, (ByteRanges{{0, 8}}));
  EXPECT_TRUE(set.contains(ByteRange{50, 50}));
}

TEST(ByteRanges, SubtractSplits) {
  ByteRanges set{{0, 32}};
  set.subtract({8, 16});
  EXPECT_EQ(set, (ByteRanges{{0, 8}, {16, 32}}));
}

TEST(ByteRanges, ReachesTheLastAddressableByte) {
  constexpr std::uint64_t kEnd = UINT64_MAX;
  ByteRanges set{{kEnd - 8, kEnd}};
  set.add({kEnd - 16, kEnd - 8});
  EXPECT_EQ(set, (ByteRanges{{kEnd - 16, kEnd}}));
  set.subtract({0, kEnd});
  EXPECT_TRUE(set.empty());
}

TEST(ByteRanges, TakesItselfAsArgument) {
  ByteRanges set{{0, 8}, {16, 24}};
  const ByteRanges before = set;
  set.add(set);
  EXPECT_EQ(set, before);
  EXPECT_TRUE(set.minus(set).empty());
  EXPECT_EQ(set.intersect(set), before);
}

class ByteRangesRandom : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ByteRangesRandom, MatchesABitmap) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  ByteRanges sets[2];
  Bitmap models[2];
  for (int step = 0; step < 400 && !HasFailure(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const std::size_t target = random() % 2;
    ByteRanges& set = sets[target];
    Bitmap& model = models[target];
    const ByteRange range = random_range(random);
    switch (random() % 8) {
      case 0:
        set.add(sets[1 - target]);
        model |= models[1 - target];
        break;
      case 1:
        set.clear();
        model.reset();
        break;
      case 2:
      case 3:
      case 4:
        set.subtract(range);
        model &= ~bitmap_of(range);
        break;
      default:
        set.add(range);
        model |= bitmap_of(range);
    }
    expect_canonical(set);
    EXPECT_EQ(bitmap_of(set), model);
    EXPECT_EQ(set.nbytes(), model.count());
    EXPECT_EQ(set.empty(), model.none());
    const ByteRange probe = random_range(random);
    EXPECT_EQ(set.contains(probe), (bitmap_of(probe) & ~model).none()) << to_string(probe);

    const ByteRanges minus = sets[0].minus(sets[1]);
    const ByteRanges both = sets[0].intersect(sets[1]);
    expect_canonical(minus);
    expect_canonical(both);
    EXPECT_EQ(bitmap_of(minus), models[0] & ~models[1]);
    EXPECT_EQ(bitmap_of(both), models[0] & models[1]);
    EXPECT_EQ(sets[0].contains(sets[1]), (models[1] & ~models[0]).none());
    for (const ByteRanges* s : {&sets[0], &sets[1]}) {
      const ByteRange span = s->span();
      EXPECT_EQ(s->empty(), span.empty());
      if (!s->empty()) {
        EXPECT_EQ(span, (ByteRange{s->ranges().front().begin, s->ranges().back().end}));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ByteRangesRandom, testing::Range<std::uint64_t>(0, 50));

}  // namespace
}  // namespace ebbtide
