// How far ahead backward loads: while no more is held than the forward held at its peak.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "engine_test_support.h"
#include "stream_driver.h"

namespace ebbtide::testing {
namespace {

constexpr std::uint64_t kBytes = 64;
constexpr std::uint64_t kLarge = 191;

// Four groups of one storage that is copied, and one that is kept, of a small and a large one.
std::vector<Saved> forward(Driver& driver) {
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  for (std::size_t label = 1; label <= 5; ++label) {
    driver.begin_group(epoch, label);
    saved.push_back(driver.pack(filled(driver, kBytes), bytes_view(0, kBytes), epoch));
    if (label == 5) saved.push_back(driver.pack(filled(driver, kLarge), bytes_view(0, kLarge), epoch));
    driver.end_group();
  }
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 4u);
  EXPECT_EQ(driver.device.used_bytes(), kBytes + kLarge);
  return saved;
}

// The most that was held while somebody had what he asked for last.
std::uint64_t backward(Driver& driver, const std::vector<Saved>& saved) {
  std::uint64_t most = 0;
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    const Storage storage = driver.unpack(*one, kPass);
    EXPECT_NE(storage, nullptr);
    most = std::max(most, driver.device.used_bytes());
    driver.drop(*one);
  }
  driver.end_pass(kPass);
  driver.expect_at_rest();
  return most;
}

TEST(EnginePeak, GroupsAreLoadedAheadUpToWhatForwardHeld) {
  Driver driver({.config = {.keep_last_groups = 1, .prefetch_groups = 0}});
  const std::vector<Saved> saved = forward(driver);
  EXPECT_EQ(backward(driver, saved), kBytes + kLarge) << "with what was just given out";
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.h2d_copies, 4u);
  EXPECT_EQ(stats.prefetch_misses, 0u);
}

TEST(EnginePeak, WithoutGroupsTooUnlessBytesAreGiven) {
  for (const std::optional<std::uint64_t> groups : {std::optional<std::uint64_t>{1}, std::optional<std::uint64_t>{}}) {
    Driver driver({.config = {.keep_last_bytes = 2 * kBytes, .prefetch_bytes = kBytes, .prefetch_groups = groups}});
    // Two are kept, and a third until it is copied.
    std::vector<Saved> saved = pack_storages(driver, 6, driver.begin_epoch());
    EXPECT_NE(driver.unpack(saved[5], kPass), nullptr);
    EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
    driver.drop(saved[5]);
    EXPECT_NE(driver.unpack(saved[4], kPass), nullptr);
    EXPECT_EQ(driver.engine.stats().h2d_copies, groups ? 2u : 1u);
    saved.pop_back();
    EXPECT_EQ(backward(driver, saved), (groups ? 3 : 2) * kBytes);
    EXPECT_EQ(driver.engine.stats().h2d_copies, 4u);
  }
}

TEST(EnginePeak, WithoutPrefetchGroupsTheStoragesOfGroupsCountAsAllOthers) {
  for (const bool to_peak : {false, true}) {
    Driver driver({.config = {.keep_last_groups = 1, .prefetch_bytes = 3 * kBytes, .prefetch_to_peak = to_peak}});
    const std::vector<Saved> saved = forward(driver);
    // Forward held what is kept and nothing else: the bound in bytes is less, one guess comes in any case.
    EXPECT_EQ(backward(driver, saved), kBytes + kLarge + (to_peak ? 1 : 3) * kBytes);
    EXPECT_EQ(driver.engine.stats().prefetch_misses, 0u);
  }
}

TEST(EnginePeak, OneGuessIsLoadedHoweverLarge) {
  Driver driver({.config = {.prefetch_bytes = 1, .prefetch_groups = 1}});
  const std::vector<Saved> saved = offloaded_storages(driver, 3);
  EXPECT_NE(driver.unpack(saved[2], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 2u);
  EXPECT_EQ(backward(driver, saved), 2 * kBytes) << "what is given out and the guess";
}

TEST(EnginePeak, PrefetchBytesAreLoadedAheadWhereForwardHeldLess) {
  Driver driver({.config = {.prefetch_bytes = 3 * kBytes, .prefetch_groups = 1}});
  const std::vector<Saved> saved = offloaded_storages(driver, 6);
  EXPECT_NE(driver.unpack(saved[5], kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u + 2u) << "with the one that is given out";
  for (const Saved& one : saved) driver.drop(one);
}

TEST(EnginePeak, MemoryThatIsLetGoOfInStreamOrderIsHeldUntilTheStreamHasComeThere) {
  StreamDriver driver({.config = {.keep_last_groups = 1, .prefetch_groups = 0, .in_flight_bytes = UINT64_MAX}});
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  for (std::size_t label = 1; label <= 4; ++label) {
    driver.begin_group(epoch, label);
    saved.push_back(driver.pack(driver.filled(kBytes), bytes_view(0, kBytes), epoch, kMain));
    driver.end_group();
    if (label == 2) driver.complete_all();
  }
  const std::vector<CopyId> leaving = driver.held(Hop::kOffload);
  ASSERT_EQ(leaving.size(), 2u);
  driver.drop(saved[1]);
  driver.complete(leaving[0]);
  EXPECT_NE(driver.unpack(saved[3], kPass, kMain), nullptr);
  EXPECT_TRUE(driver.held(Hop::kLoad).empty()) << "its memory comes back after the copy queued last";
  driver.complete(leaving[1]);
  EXPECT_NE(driver.unpack(saved[3], kPass, kMain), nullptr);
  EXPECT_EQ(driver.held(Hop::kLoad).size(), 1u);
  for (const std::size_t n : {0, 2, 3}) driver.drop(saved[n]);
  driver.end_pass(kPass);
  driver.complete_all();
  driver.expect_at_rest();
}

}  // namespace
}  // namespace ebbtide::testing
