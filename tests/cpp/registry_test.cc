#include "ebbtide/registry.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace ebbtide {
namespace {

constexpr StorageRef kSource{DeviceId{0}, 7, 0x1000, 64};
constexpr StorageRef kRestored{DeviceId{0}, 8, 0x2000, 64};
constexpr EpochId kEpoch{1};

TEST(Registry, IdsAreNeverUsedAgain) {
  Registry registry;
  const StorageId first = registry.create(kSource, 0, kEpoch).id;
  registry.erase(first);
  const StorageId second = registry.create(kSource, 0, kEpoch).id;
  EXPECT_NE(value(first), 0u);
  EXPECT_NE(first, second);
  EXPECT_EQ(registry.find(first), nullptr);

  const TicketId ticket = registry.issue(*registry.find(second), 0);
  registry.revoke(ticket);
  EXPECT_NE(registry.issue(*registry.find(second), 0), ticket);
}

TEST(Registry, FindsBySavedIdentityWithinTheEpoch) {
  Registry registry;
  Entry& entry = registry.create(kSource, 0, kEpoch);
  EXPECT_EQ(registry.find_saved(7, kEpoch), &entry);
  EXPECT_EQ(registry.find_saved(7, EpochId{2}), nullptr);
  EXPECT_EQ(registry.find_saved(8, kEpoch), nullptr);
  registry.close_epoch(kEpoch);
  EXPECT_EQ(registry.find_saved(7, kEpoch), nullptr);
  EXPECT_EQ(registry.find(entry.id), &entry);
}

TEST(Registry, NewerEntryOfAnIdentityIsFoundAndSurvivesTheOlder) {
  Registry registry;
  Entry& older = registry.create(kSource, 0, kEpoch);
  Entry& newer = registry.create(kSource, 1, kEpoch);
  EXPECT_EQ(registry.find_saved(7, kEpoch), &newer);
  registry.erase(older.id);
  EXPECT_EQ(registry.find_saved(7, kEpoch), &newer);
}

TEST(Registry, FindsByRestoredIdentityUntilHidden) {
  Registry registry;
  Entry& entry = registry.create(kSource, 0, kEpoch);
  registry.bind_restored(entry, kRestored);
  EXPECT_EQ(registry.find_restored(8), &entry);
  EXPECT_EQ(registry.find_restored(7), nullptr);
  registry.hide(entry);
  EXPECT_EQ(registry.find_restored(8), nullptr);
  EXPECT_EQ(registry.find_saved(7, kEpoch), nullptr);
  EXPECT_TRUE(entry.closed);
}

TEST(Registry, UnbindingLeavesAnotherEntrysRestoredStorage) {
  Registry registry;
  Entry& first = registry.create(kSource, 0, kEpoch);
  Entry& second = registry.create(kSource, 1, kEpoch);
  registry.bind_restored(first, kRestored);
  registry.bind_restored(second, kRestored);
  registry.unbind_restored(first);
  EXPECT_EQ(registry.find_restored(8), &second);
}

TEST(Registry, CountsLiveTickets) {
  Registry registry;
  Entry& entry = registry.create(kSource, 0, kEpoch);
  const TicketId first = registry.issue(entry, 0);
  const TicketId second = registry.issue(entry, 3);
  EXPECT_EQ(entry.live_tickets, 2u);
  EXPECT_EQ(registry.ticket(second)->view, 3u);
  EXPECT_EQ(registry.ticket(second)->storage, entry.id);
  registry.revoke(first);
  registry.revoke(first);
  EXPECT_EQ(entry.live_tickets, 1u);
  EXPECT_EQ(registry.ticket(first), nullptr);
  EXPECT_EQ(registry.tickets(), 1u);
}

TEST(Registry, WalksBackInOrderOfSaving) {
  Registry registry;
  std::vector<StorageId> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(registry.create(kSource, 0, kEpoch).id);
  registry.erase(ids[1]);
  std::vector<StorageId> visited;
  const auto visit = [&](Entry& entry) {
    visited.push_back(entry.id);
    return true;
  };
  const auto need = [&](StorageId id) { return registry.find(id)->need; };
  registry.walk_back(need(ids[3]), visit);
  EXPECT_EQ(visited, (std::vector<StorageId>{ids[2], ids[0]}));
  visited.clear();
  registry.walk_back(need(ids[0]), visit);
  EXPECT_TRUE(visited.empty());
  registry.walk_back(need(ids[3]), [&](Entry& entry) {
    visited.push_back(entry.id);
    return false;
  });
  EXPECT_EQ(visited, (std::vector<StorageId>{ids[2]}));
}

TEST(Registry, SavedAgainItIsNeededBeforeAllThatWasSavedEarlier) {
  Registry registry;
  std::vector<StorageId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(registry.create(kSource, 0, kEpoch).id);
  const auto order = [&] {
    std::vector<StorageId> visited;
    registry.walk_back(UINT64_MAX, [&](Entry& entry) {
      visited.push_back(entry.id);
      return true;
    });
    return visited;
  };
  registry.renew(*registry.find(ids[0]), GroupId{1});
  EXPECT_EQ(order(), (std::vector<StorageId>{ids[0], ids[2], ids[1]}));
  registry.renew(*registry.find(ids[1]), GroupId{1});
  registry.renew(*registry.find(ids[0]), GroupId{1});
  EXPECT_EQ(order(), (std::vector<StorageId>{ids[0], ids[1], ids[2]}));
}

TEST(Entry, MissingIsWhatIsWantedAndNotCopied) {
  Entry entry;
  entry.wanted = {{0, 16}, {32, 64}};
  entry.valid = {{0, 16}};
  EXPECT_EQ(entry.missing(), (ByteRanges{{32, 64}}));
}

TEST(Entry, LoadsOnlyWhatTheRestoredStorageIsToHold) {
  Entry entry;
  entry.stored = {{{0, 16}, ParcelId{1}, 0}, {{32, 64}, ParcelId{2}, 16}};
  entry.restored_valid = {{0, 16}};
  ASSERT_EQ(entry.to_load().size(), 1u);
  EXPECT_EQ(entry.to_load().front().parcel, ParcelId{1});
}

}  // namespace
}  // namespace ebbtide
