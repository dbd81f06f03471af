#include "ebbtide/view_meta.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "ebbtide/error.h"

namespace ebbtide {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

ViewMeta view(std::int64_t storage_offset, std::int64_t itemsize, std::vector<std::int64_t> sizes,
              std::vector<std::int64_t> strides) {
  return {storage_offset, itemsize, 0, std::move(sizes), std::move(strides)};
}

void expect_refused(const ViewMeta& meta) {
  try {
    const ByteRange range = extent(meta);
    ADD_FAILURE() << to_string(meta) << " has the extent " << to_string(range);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find(to_string(meta)), std::string::npos) << error.what();
  }
}

TEST(ViewMeta, ExtentOfCommonViews) {
  EXPECT_EQ(extent(view(0, 4, {2, 3}, {3, 1})), (ByteRange{0, 24}));
  EXPECT_EQ(extent(view(5, 2, {}, {})), (ByteRange{10, 12})) << "a scalar is one element";
  EXPECT_EQ(extent(view(3, 4, {2, 2}, {8, 1})), (ByteRange{12, 52})) << "rows of a wider matrix";
  EXPECT_EQ(extent(view(7, 4, {1000, 1000}, {0, 0})), (ByteRange{28, 32})) << "an expanded element";
  EXPECT_EQ(extent(view(9, 1, {10}, {-1})), (ByteRange{0, 10})) << "a flipped vector";
  EXPECT_EQ(extent(view(0, 4, {4, 3}, {1, 1})), (ByteRange{0, 24})) << "overlapping windows";
}

TEST(ViewMeta, EmptyViewsTouchNothing) {
  EXPECT_EQ(extent(view(100, 4, {0}, {1})), (ByteRange{0, 0}));
  EXPECT_EQ(extent(view(100, 4, {kMax, 0}, {kMax, 1})), (ByteRange{0, 0}));
  EXPECT_EQ(extent(view(100, 0, {4}, {1})), (ByteRange{0, 0}));
}

TEST(ViewMeta, StridesOfSingleElementsDoNotCount) {
  EXPECT_EQ(extent(view(2, 4, {1, 2}, {kMax, 1})), (ByteRange{8, 16}));
  EXPECT_EQ(extent(view(2, 4, {1, 2}, {kMin, 1})), (ByteRange{8, 16}));
}

TEST(ViewMeta, RefusesWhatIsNoView) {
  expect_refused(view(0, 4, {2, 3}, {1}));
  expect_refused(view(0, 4, {-1}, {1}));
  expect_refused(view(0, 4, {0, -1}, {1, 1}));
  expect_refused(view(0, -4, {2}, {1}));
  expect_refused(view(-1, 4, {2}, {1}));
  expect_refused(view(8, 4, {10}, {-1}));
}

TEST(ViewMeta, RefusesOverflow) {
  EXPECT_EQ(extent(view(kMax - 1, 1, {}, {})), (ByteRange{kMax - 1, kMax}));
  expect_refused(view(kMax, 1, {}, {}));
  expect_refused(view(kMax / 8 + 1, 8, {}, {}));
  expect_refused(view(0, 1, {kMax}, {2}));
  expect_refused(view(0, 1, {3}, {kMin}));
  expect_refused(view(0, 1, {kMax, kMax}, {1, 1}));
  expect_refused(view(kMin, kMax, {kMax}, {kMin}));
}

TEST(ViewMeta, PrintsItsGeometry) {
  EXPECT_EQ(to_string(ViewMeta{5, 2, 7, {2, 3}, {-3, 0}}),
            "view of sizes [2, 3], strides [-3, 0], storage_offset 5, itemsize 2, kind 7");
}

// Elements that the view reaches, one index after the other.
std::set<std::int64_t> touched_elements(const ViewMeta& meta) {
  std::set<std::int64_t> touched{meta.storage_offset};
  for (std::size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    std::set<std::int64_t> next;
    for (const std::int64_t element : touched) {
      for (std::int64_t i = 0; i < meta.sizes[dim]; ++i) next.insert(element + i * meta.strides[dim]);
    }
    touched = std::move(next);
  }
  return touched;
}

class ViewMetaRandom : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ViewMetaRandom, ExtentHoldsJustTheTouchedBytes) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int i = 0; i < 200 && !HasFailure(); ++i) {
    ViewMeta meta = view(pick(-2, 60), std::int64_t{1} << pick(0, 4), {}, {});
    for (std::int64_t dims = pick(0, 4); dims > 0; --dims) {
      const std::int64_t size = pick(0, 9) == 0 ? 0 : pick(1, 5);
      meta.sizes.push_back(size);
      meta.strides.push_back(size == 1 ? pick(-1000, 1000) : pick(-4, 12));
    }
    const std::set<std::int64_t> touched = touched_elements(meta);
    SCOPED_TRACE(to_string(meta));
    if (touched.empty()) {
      EXPECT_EQ(extent(meta), (ByteRange{0, 0}));
    } else if (*touched.begin() < 0) {
      expect_refused(meta);
    } else {
      EXPECT_EQ(extent(meta), (ByteRange{static_cast<std::uint64_t>(*touched.begin() * meta.itemsize),
                                         static_cast<std::uint64_t>((*touched.rbegin() + 1) * meta.itemsize)}));
    }
  }
}

__extension__ using Wide = __int128;

// The extent in 128 bits, or nothing where it leaves 63 bits or starts before the storage.
std::optional<ByteRange> wide_extent(const ViewMeta& meta) {
  Wide first = meta.storage_offset;
  Wide last = meta.storage_offset;
  for (std::size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    const Wide reach = Wide{meta.sizes[dim] - 1} * meta.strides[dim];
    (reach < 0 ? first : last) += reach;
  }
  if (first < 0 || last >= kMax || (last + 1) * meta.itemsize > kMax) return std::nullopt;
  return ByteRange{static_cast<std::uint64_t>(first * meta.itemsize),
                   static_cast<std::uint64_t>((last + 1) * meta.itemsize)};
}

TEST_P(ViewMetaRandom, HugeViewsAreExactOrRefused) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937_64 random(GetParam());
  const auto magnitude = [&](int max_bits) {
    return static_cast<std::int64_t>(random() >> (64 - (1 + random() % static_cast<unsigned>(max_bits))));
  };
  for (int i = 0; i < 500 && !HasFailure(); ++i) {
    ViewMeta meta = view(magnitude(63), 1 + magnitude(5), {}, {});
    for (std::uint64_t dims = random() % 4; dims > 0; --dims) {
      meta.sizes.push_back(1 + magnitude(40));
      meta.strides.push_back(random() % 4 == 0 ? -magnitude(62) : magnitude(62));
    }
    SCOPED_TRACE(to_string(meta));
    const std::optional<ByteRange> expected = wide_extent(meta);
    if (expected) {
      EXPECT_EQ(extent(meta), *expected);
    } else {
      expect_refused(meta);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ViewMetaRandom, testing::Range<std::uint64_t>(0, 20));

}  // namespace
}  // namespace ebbtide
