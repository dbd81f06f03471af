// Packing: storages that cross together, on their way out.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ebbtide/error.h"
#include "engine_test_support.h"

namespace ebbtide::testing {
namespace {

constexpr EngineConfig kPacking{.keep_last_groups = 0, .in_flight_bytes = UINT64_MAX, .pack_below_bytes = 128};

// `count` storages of one group that nobody else holds, 16 bytes and more.
std::vector<Saved> save_group(Driver& driver, EpochId epoch, int count) {
  std::vector<Saved> saved;
  driver.begin_group(epoch, 1);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t nbytes = 16 + 8 * static_cast<std::uint64_t>(i);
    Storage storage = driver.device.allocate(nbytes, 48 * static_cast<std::uint64_t>(i));
    write(storage, static_cast<std::uint8_t>(10 * i));
    saved.push_back(driver.pack(std::move(storage), bytes_view(0, nbytes), epoch));
  }
  driver.end_group();
  return saved;
}

std::vector<StorageId> offloading(const Driver& driver) {
  std::vector<StorageId> storages;
  for (const CopyId copy : driver.held(Hop::kOffload)) {
    for (const StorageId storage : driver.command(copy).storages) storages.push_back(storage);
  }
  return storages;
}

TEST(EnginePack, SameBytesInFewerCopies) {
  Stats stats[2];
  for (const bool packed : {false, true}) {
    EngineConfig config = kPacking;
    if (!packed) config.pack_below_bytes = 0;
    Driver driver({.config = config});
    const EpochId epoch = driver.begin_epoch();
    std::vector<Saved> saved = save_group(driver, epoch, 6);
    Storage large = filled(driver, 256);
    saved.push_back(driver.pack(large, bytes_view(0, 200), epoch));
    saved.push_back(driver.pack(std::move(large), bytes_view(100, 256), epoch));
    driver.end_epoch(epoch);
    EXPECT_EQ(driver.device.used_bytes(), 0u);
    for (auto one = saved.rbegin(); one != saved.rend(); ++one) EXPECT_NE(driver.unpack(*one, kPass), nullptr);
    stats[packed] = driver.engine.stats();
    driver.end_pass(kPass);
    for (const Saved& one : saved) driver.drop(one);
    driver.expect_at_rest();
  }
  EXPECT_EQ(stats[1].d2h_bytes, stats[0].d2h_bytes);
  EXPECT_EQ(stats[1].h2d_bytes, stats[0].h2d_bytes);
  EXPECT_EQ(stats[1].unique_bytes, stats[0].unique_bytes);
  EXPECT_EQ(stats[1].freed_bytes, stats[0].freed_bytes);
  EXPECT_EQ(stats[0].d2h_copies, 7u);
  EXPECT_EQ(stats[0].h2d_copies, 7u);
  EXPECT_EQ(stats[1].d2h_copies, 2u);
  EXPECT_EQ(stats[1].h2d_copies, 2u);
}

TEST(EnginePack, OfAPackThatFindsNoRoomAPartGoes) {
  EngineConfig config = kPacking;
  config.max_tier_bytes = 100;
  Driver driver({.config = config});
  const EpochId epoch = driver.begin_epoch();
  const std::vector<Saved> saved = save_group(driver, epoch, 4);  // of 16, 24, 32 and 40 bytes
  driver.end_epoch(epoch);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_bytes, 16u + 24u + 32u);
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kHostFull)], 1u);
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) EXPECT_NE(driver.unpack(*one, kPass), nullptr);
  driver.end_pass(kPass);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePack, AStorageInAPackForTwoEpochsIsFreeAfterwards) {
  Driver driver({.config = kPacking});
  const EpochId epochs[] = {driver.begin_epoch(), driver.begin_epoch()};
  Storage storage = filled(driver, 64);
  driver.begin_group(epochs[1], 1);
  const Saved first = driver.pack(storage, bytes_view(0, 64), epochs[0]);
  const Saved second = driver.pack(std::move(storage), bytes_view(0, 64), epochs[1]);
  driver.end_group();
  for (const EpochId epoch : epochs) driver.end_epoch(epoch);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.d2h_copies, 1u);
  EXPECT_EQ(stats.freed_bytes, 128u);
  EXPECT_EQ(stats.unfreed_bytes, 0u);
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  for (const Saved& one : {second, first}) EXPECT_NE(driver.unpack(one, kPass), nullptr);
  driver.end_pass(kPass);
  for (const Saved& one : {first, second}) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePack, AnAliasGroupIsNeverSplit) {
  EngineConfig config = kPacking;
  config.pack_bytes = 40;
  Driver driver({.config = config, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  driver.begin_group(epoch, 1);
  std::vector<Saved> saved;
  for (int i = 0; i < 4; ++i) {
    Storage storage = filled(driver, 64, static_cast<std::uint8_t>(i));
    saved.push_back(driver.pack(storage, bytes_view(0, 12), epoch));
    saved.push_back(driver.pack(storage, bytes_view(8, 16), epoch));
    saved.push_back(driver.pack(std::move(storage), bytes_view(40, 56), epoch));
  }
  driver.end_group();
  std::vector<StorageId> storages = offloading(driver);
  EXPECT_EQ(storages.size(), 4u);
  std::ranges::sort(storages);
  EXPECT_TRUE(std::ranges::adjacent_find(storages) == storages.end()) << "two parts of one storage";
  EXPECT_EQ(driver.held().size(), 4u) << "two of them do not fit into one pack";
  driver.complete_all();
  std::vector<Storage> restored;
  for (const Saved& one : saved) restored.push_back(driver.unpack(one, kPass));
  for (std::size_t i = 0; i < saved.size(); ++i) EXPECT_EQ(restored[i], restored[i / 3 * 3]);
  EXPECT_EQ(driver.engine.stats().h2d_bytes, driver.engine.stats().d2h_bytes);
  for (const Saved& one : saved) driver.drop(one);
  restored.clear();
  driver.complete_all();
  driver.expect_at_rest();
}

TEST(EnginePack, APackIsSentWhenItIsFull) {
  EngineConfig config = kPacking;
  config.pack_bytes = 128;
  Driver driver({.config = config, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  for (int i = 0; i < 5; ++i) saved.push_back(driver.pack(filled(driver, 64), bytes_view(0, 64), epoch));
  EXPECT_EQ(driver.held().size(), 2u);
  driver.end_epoch(epoch);
  EXPECT_EQ(driver.held().size(), 3u) << "at the end of the epoch, what is there";
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 5 * 64u);
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

TEST(EnginePack, MembersOfAnyResidueComeBackInOne) {
  Driver driver({.config = kPacking, .hold_copies = true});
  const EpochId epoch = driver.begin_epoch();
  driver.begin_group(epoch, 1);
  std::vector<Saved> saved;
  for (const std::uint64_t residue : {3u, 16u, 500u, 0u, 257u}) {
    Storage storage = driver.device.allocate(21, residue);
    write(storage, static_cast<std::uint8_t>(residue));
    saved.push_back(driver.pack(std::move(storage), bytes_view(1, 20), epoch));
  }
  driver.end_group();
  ASSERT_EQ(driver.held().size(), 1u);
  driver.complete_all();
  for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, kPass), nullptr);
  EXPECT_EQ(driver.engine.stats().h2d_copies, 1u);
  driver.complete_all();
  for (const Saved& one : saved) driver.drop(one);
  driver.expect_at_rest();
}

class EnginePackMember : public ::testing::Test {
 protected:
  // Three storages that wait for the end of their group.
  void save(bool hold_storages = false) {
    driver.begin_group(epoch, 1);
    for (int i = 0; i < 3; ++i) {
      Storage storage = filled(driver, 32, static_cast<std::uint8_t>(i));
      if (hold_storages) held.push_back(storage);
      saved.push_back(driver.pack(std::move(storage), bytes_view(0, 32), epoch));
    }
    // The probes are answered, and nothing is gathered yet.
    gather = driver.engine.end_group();
    ASSERT_EQ(gather.back().kind, CommandKind::kGather);
    gather.pop_back();
    driver.run(gather);
    ASSERT_TRUE(driver.held().empty());
  }
  void send() { driver.run({{.kind = CommandKind::kGather}}); }
  void finish() {
    driver.complete_all();
    driver.end_epoch(epoch);
    driver.complete_all();
    for (const Saved& one : saved) EXPECT_NE(driver.unpack(one, kPass), nullptr);
    driver.end_pass(kPass);
    driver.complete_all();
    for (const Saved& one : saved) driver.drop(one);
    held.clear();
    driver.expect_at_rest();
  }
  [[nodiscard]] std::vector<StorageId> ids(const std::vector<std::size_t>& which) const {
    std::vector<StorageId> result;
    for (const std::size_t i : which) result.push_back(saved[i].storage);
    return result;
  }

  Driver driver{{.config = kPacking, .hold_copies = true}};
  const EpochId epoch = driver.begin_epoch();
  std::vector<Saved> saved;
  std::vector<Storage> held;
  Commands gather;
};

TEST_F(EnginePackMember, DroppedIsLeftOut) {
  save();
  driver.drop(saved[1]);
  EXPECT_EQ(driver.device.used_bytes(), 64u);
  send();
  EXPECT_EQ(offloading(driver), ids({0, 2}));
  saved.erase(saved.begin() + 1);
  finish();
}

TEST_F(EnginePackMember, HeldByOthersIsLeftOutUntilItIsFree) {
  save(true);
  held.erase(held.begin());
  held.erase(held.begin() + 1);
  driver.end_epoch(epoch);
  EXPECT_EQ(offloading(driver), ids({0, 2}));
  EXPECT_EQ(driver.engine.stats().parked, 1u);
  driver.complete_all();
  held.clear();
  driver.end_epoch(epoch);
  EXPECT_EQ(offloading(driver), ids({1}));
  finish();
}

TEST_F(EnginePackMember, GivenToSomebodyWhileItWaitsIsLookedAtAgain) {
  save();
  held.push_back(driver.unpack(saved[1], kPass));
  EXPECT_EQ(driver.engine.stats().live_hits, 1u);
  send();
  EXPECT_EQ(offloading(driver), ids({0, 2}));
  driver.complete_all();
  held.clear();
  // Once more among those that wait, and once only.
  driver.end_epoch(epoch);
  EXPECT_EQ(offloading(driver), ids({1}));
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 96u);
  finish();
}

TEST_F(EnginePackMember, GivenToSomebodyAndFreeAgainIsInThePackOnce) {
  save();
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  driver.end_epoch(epoch);
  EXPECT_EQ(offloading(driver), ids({0, 2, 1}));
  finish();
}

TEST_F(EnginePackMember, WrittenToDuringTheCopyIsDiscardedAlone) {
  save(true);
  const std::shared_ptr<Counter> counter = held[1]->counter;
  held.clear();
  driver.end_epoch(epoch);
  ASSERT_EQ(offloading(driver), ids({0, 1, 2}));
  ++*counter;
  driver.complete_all();
  EXPECT_EQ(driver.engine.stats().d2h_bytes, 64u);
  EXPECT_EQ(driver.engine.stats().d2h_copies, 1u);
  EXPECT_THROW((void)driver.engine.restore(saved[1].ticket, kPass, false, false), Error);
  driver.drop(saved[1]);
  saved.erase(saved.begin() + 1);
  finish();
}

TEST_F(EnginePackMember, GivenToSomebodyDuringTheCopyWaitsForIt) {
  save();
  send();
  ASSERT_EQ(driver.held().size(), 1u);
  EXPECT_NE(driver.unpack(saved[1], kPass), nullptr);
  EXPECT_TRUE(driver.held().empty()) << "nobody may write under a copy that reads";
  finish();
}

TEST_F(EnginePackMember, EveryOneStaysWhenTheCopyFails) {
  save();
  send();
  driver.complete(driver.held().front(), false);
  const Stats stats = driver.engine.stats();
  EXPECT_EQ(stats.kept[static_cast<std::size_t>(KeepReason::kHostFull)], 3u);
  EXPECT_EQ(stats.d2h_bytes + stats.d2h_copies + stats.tier_bytes, 0u);
  EXPECT_EQ(driver.tier_full, 1);
  finish();
  EXPECT_EQ(driver.engine.stats().live_hits, 3u);
}

TEST_F(EnginePackMember, DroppedDuringTheCopyKeepsItsSourceUntilThatIsDone) {
  save();
  send();
  driver.drop(saved[1]);
  EXPECT_EQ(driver.device.used_bytes(), 96u);
  driver.complete_all();
  EXPECT_EQ(driver.device.used_bytes(), 0u);
  saved.erase(saved.begin() + 1);
  finish();
}

TEST_F(EnginePackMember, TheBlockLivesAsLongAsOneOfThem) {
  save();
  send();
  driver.complete_all();
  const std::uint64_t nbytes = driver.space->used_bytes();
  driver.drop(saved[0]);
  driver.drop(saved[2]);
  EXPECT_EQ(driver.space->used_bytes(), nbytes);
  saved = {saved[1]};
  finish();
}

}  // namespace
}  // namespace ebbtide::testing
