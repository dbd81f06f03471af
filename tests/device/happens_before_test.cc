#include "happens_before.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "address.h"

namespace ebbtide::device {
namespace {

constexpr std::uint64_t kBase = std::uint64_t{1} << 20;

Access access(std::uint64_t begin, std::uint64_t nbytes, bool write) {
  return {pointer_to(kBase + begin), nbytes, write};
}

TEST(HappensBefore, ReportsTheBytesThatBothTouch) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  order.access(a, "write", {access(0, 100, true)});
  order.access(b, "read", {access(50, 100, false)});
  ASSERT_EQ(order.races().size(), 1U);
  const Race& race = order.races().front();
  EXPECT_EQ(race.begin, kBase + 50);
  EXPECT_EQ(race.end, kBase + 100);
  EXPECT_EQ(to_string(race), "write and read touch [0x100032, 0x100064) without order");
}

TEST(HappensBefore, NeighboursDoNotTouch) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  order.access(a, "write", {access(0, 100, true)});
  order.access(b, "write", {access(100, 100, true)});
  order.access(b, "nothing", {access(50, 0, true)});
  EXPECT_TRUE(order.races().empty());
}

TEST(HappensBefore, ReadsMayMeet) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  order.access(a, "read", {access(0, 100, false)});
  order.access(b, "read", {access(0, 100, false)});
  EXPECT_TRUE(order.races().empty());
  order.access(b, "write", {access(0, 100, true)});
  ASSERT_EQ(order.races().size(), 1U) << "the read of the other stream is still to be remembered";
}

TEST(HappensBefore, TellsARaceOnce) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  for (int i = 0; i < 10; ++i) {
    order.access(a, "a", {access(0, 100, true)});
    order.access(b, "b", {access(0, 100, true)});
  }
  EXPECT_EQ(order.races().size(), 2U);
}

TEST(HappensBefore, TellsOfOneRaceOverManyPieces) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  for (std::uint64_t i = 0; i < 8; ++i) order.access(a, "piece", {access(10 * i, 10, true)});
  order.access(b, "all", {access(0, 80, true)});
  ASSERT_EQ(order.races().size(), 1U);
  EXPECT_EQ(order.races().front().end - order.races().front().begin, 80U);
}

TEST(HappensBefore, RemembersNoMoreThanIsOfUse) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  for (std::uint64_t i = 0; i < 100000; ++i) {
    order.access(a, "a", {access(100 * i, 10, i % 2 == 0)});
    if (i % 100 == 0) order.join(kHost, order.clock(a));
  }
  EXPECT_LT(order.segments(), 4000U);
  order.access(b, "b", {access(0, 100 * 100000, true)});
  ASSERT_FALSE(order.races().empty()) << "forgot what the host has not seen";
  EXPECT_GE(order.races().front().begin, kBase + 100 * (100000 - 100));
}

TEST(HappensBefore, ForgetsNoneThatTheHostHasNotSeen) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  order.access(a, "write", {access(0, 10, true)});
  order.access(a, "read", {access(20, 10, false)});
  for (std::uint64_t i = 0; i < 10000; ++i) order.access(kHost, "host", {access(100 + 100 * i, 10, true)});
  EXPECT_LT(order.segments(), 4000U);
  order.access(b, "b", {access(0, 30, true)});
  ASSERT_EQ(order.races().size(), 2U);
}

TEST(HappensBefore, SegmentsOfWholeBlocksStayFew) {
  HappensBefore order;
  const Actor a = order.add_stream();
  for (std::uint64_t i = 0; i < 1000; ++i) order.access(a, "piece", {access(10 * i, 10, i % 3 == 0)});
  order.access(a, "all", {access(0, 10000, true)});
  EXPECT_EQ(order.segments(), 1U);
}

TEST(HappensBefore, StartsAfreshWhenSwitchedOn) {
  HappensBefore order;
  const Actor a = order.add_stream();
  const Actor b = order.add_stream();
  order.access(a, "a", {access(0, 10, true)});
  order.set_enabled(false);
  order.access(b, "b", {access(0, 10, true)});
  order.set_enabled(true);
  order.access(b, "b", {access(0, 10, true)});
  EXPECT_TRUE(order.races().empty());
  order.access(a, "a", {access(0, 10, true)});
  EXPECT_EQ(order.races().size(), 1U);
}

// The order relation as the set of steps that come before each step.
class Model {
 public:
  explicit Model(std::size_t actors) : last_(actors) {}

  void step(Actor actor, const Access& access) {
    std::vector<bool> before = last_[actor];
    if (actor != kHost) merge(before, last_[kHost]);
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const bool ordered = i < before.size() && before[i];
      if (!ordered && conflict(steps_[i], access)) racy_ = true;
    }
    before.resize(steps_.size() + 1);
    before[steps_.size()] = true;
    steps_.push_back(access);
    last_[actor] = before;
  }
  void join(Actor actor, Actor other) { merge(last_[actor], last_[other]); }
  [[nodiscard]] bool racy() const { return racy_; }

 private:
  static void merge(std::vector<bool>& into, const std::vector<bool>& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) into[i] = into[i] || from[i];
  }
  static bool conflict(const Access& a, const Access& b) {
    const std::uint64_t begin = std::max(address_of(a.begin), address_of(b.begin));
    const std::uint64_t end = std::min(address_of(a.begin) + a.nbytes, address_of(b.begin) + b.nbytes);
    return (a.write || b.write) && begin < end;
  }

  std::vector<Access> steps_;
  std::vector<std::vector<bool>> last_;
  bool racy_ = false;
};

TEST(HappensBefore, AgreesWithAModelOfAllPairs) {
  int racy = 0;
  constexpr int kRounds = 4000;
  for (int seed = 0; seed < kRounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](std::uint64_t n) { return random() % n; };
    constexpr std::size_t kActors = 4;
    HappensBefore order;
    for (std::size_t i = 1; i < kActors; ++i) static_cast<void>(order.add_stream());
    Model model(kActors);
    const std::uint64_t steps = 4 + below(20);
    for (std::uint64_t i = 0; i < steps; ++i) {
      const Actor actor = below(kActors);
      if (below(3) > 0) {
        const Actor other = below(kActors);
        order.join(actor, order.clock(other));
        model.join(actor, other);
      }
      const Access one = access(below(8), 1 + below(4), below(3) == 0);
      order.access(actor, std::to_string(i), {one});
      model.step(actor, one);
      ASSERT_EQ(!order.races().empty(), model.racy()) << "seed " << seed << ", step " << i;
      // After a race the first one has replaced what the second would be compared with.
      if (model.racy()) break;
    }
    racy += model.racy() ? 1 : 0;
  }
  EXPECT_GT(racy, kRounds / 10);
  EXPECT_LT(racy, kRounds * 9 / 10);
}

}  // namespace
}  // namespace ebbtide::device
