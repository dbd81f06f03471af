#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <stdexcept>
#include <vector>

#include "arena.h"
#include "test_support.h"

namespace ebbtide::device {
namespace {

TEST(Memory, IsUnreadableUnlessOpen) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  EXPECT_FALSE(readable(block));
  bool inside = false;
  rig.device.kernel("look", rig.main, {{block, kBytes, false}}, [&] { inside = readable(block + kBytes - 1); });
  EXPECT_TRUE(inside);
  EXPECT_FALSE(readable(block));
  rig.device.host_access("look", {{block, kBytes, false}}, [&] { inside = readable(block); });
  EXPECT_TRUE(inside);
  EXPECT_FALSE(readable(block));
}

TEST(Memory, OpensOnlyTheAskedPages) {
  Rig rig;
  unsigned char* const block = rig.allocate(4 * page_bytes());
  const Device::Open open(rig.device, {{block + page_bytes() + 1, page_bytes(), false}});
  EXPECT_FALSE(readable(block));
  EXPECT_TRUE(readable(block + page_bytes()));
  EXPECT_TRUE(readable(block + 2 * page_bytes()));
  EXPECT_FALSE(readable(block + 3 * page_bytes()));
}

TEST(Memory, StaysOpenUntilTheLastOneOverAPageIsGone) {
  Rig rig;
  unsigned char* const block = rig.allocate(3 * page_bytes());
  {
    const Device::Open all(rig.device, {{block, 3 * page_bytes(), false}});
    { const Device::Open middle(rig.device, {{block + page_bytes(), 1, false}, {block + page_bytes(), 1, true}}); }
    EXPECT_TRUE(readable(block + page_bytes()));
  }
  {
    const Device::Open middle(rig.device, {{block + page_bytes(), 1, false}});
    const Device::Open all(rig.device, {{block, 3 * page_bytes(), false}});
    for (std::uint64_t page = 0; page < 3; ++page) EXPECT_TRUE(readable(block + page * page_bytes())) << page;
  }
  for (std::uint64_t page = 0; page < 3; ++page) EXPECT_FALSE(readable(block + page * page_bytes())) << page;
}

TEST(Memory, StaysOpenInAKernelThatACopyRunsIn) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  std::vector<unsigned char> host(kBytes);
  rig.device.kernel("outer", rig.main, {{block, kBytes, true}}, [&] {
    rig.device.copy(host.data(), block, kBytes, rig.main);
    EXPECT_TRUE(readable(block));
  });
  EXPECT_FALSE(readable(block));
}

TEST(Memory, ClosesAfterAKernelThatThrows) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  const auto raise = [] { throw std::runtime_error("kernel"); };
  EXPECT_THROW(rig.device.kernel("raise", rig.main, {{block, kBytes, true}}, raise), std::runtime_error);
  EXPECT_FALSE(readable(block));
  rig.fill(block, 1, rig.main);
}

TEST(Memory, BlocksStartAtMultiplesOf512AndKnowTheirDevice) {
  Rig rig({.devices = 2});
  for (const std::uint64_t nbytes : {1, 513, 100000}) {
    void* const block = rig.device.allocate(nbytes, {1, 0});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 512, 0U);
    EXPECT_TRUE(rig.device.owns(block));
    EXPECT_EQ(rig.device.device_of(block), 1);
  }
  EXPECT_EQ(rig.device.device_of(rig.allocate()), 0);
  int outside = 0;
  EXPECT_FALSE(rig.device.owns(&outside));
  EXPECT_THROW(static_cast<void>(rig.device.device_of(&outside)), std::invalid_argument);
}

TEST(Memory, FreedAddressesComeBackAtOnceToTheirStreamAlone) {
  Rig rig;
  unsigned char* const first = rig.allocate();
  unsigned char* const second = rig.allocate();
  rig.device.free(first);
  rig.device.free(second);
  EXPECT_NE(rig.allocate(kBytes, rig.side), second);
  EXPECT_EQ(rig.allocate(), second);
  EXPECT_EQ(rig.allocate(), first);
}

TEST(Memory, ASmallerRequestTakesPartOfAFreedBlock) {
  Rig rig;
  unsigned char* const block = rig.allocate(4 * page_bytes());
  rig.device.free(block);
  std::set<unsigned char*> parts;
  for (int i = 0; i < 4; ++i) parts.insert(rig.allocate(page_bytes()));
  EXPECT_EQ(parts.size(), 4U);
  EXPECT_EQ(*parts.begin(), block);
  EXPECT_EQ(*parts.rbegin(), block + 3 * page_bytes());
}

TEST(Memory, FreedAddressesComeBackLateWhenDelayed) {
  Rig rig({.capacity_bytes = 4 * kBytes, .reuse = Reuse::kDelayed});
  unsigned char* const first = rig.allocate();
  unsigned char* const second = rig.allocate();
  rig.device.free(first);
  rig.device.free(second);
  std::set<unsigned char*> unused{rig.allocate(), rig.allocate()};
  EXPECT_EQ(unused.count(first) + unused.count(second), 0U);
  EXPECT_EQ(rig.allocate(), first);
  EXPECT_EQ(rig.allocate(), second);
}

TEST(Memory, ADistantUseKeepsABlockUntilItIsDone) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.fill(block, 1, rig.main);
  rig.order(rig.main, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  rig.device.used_on(block + 1, rig.side);
  rig.device.free(block);
  EXPECT_EQ(rig.device.memory(0).pending_bytes, kBytes);
  unsigned char* const other = rig.allocate();
  EXPECT_NE(other, block);
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(block, 1)) << "poisoned before the use was done";
  rig.device.synchronize(rig.side);
  EXPECT_TRUE(rig.holds(host, 1));
  EXPECT_EQ(rig.allocate(), block);
  EXPECT_EQ(rig.device.memory(0).pending_bytes, 0U);
  rig.fill(block, 2, rig.main);
  EXPECT_EQ(rig.races(), "");
}

TEST(Memory, AUseThatIsDoneKeepsNothing) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  rig.device.used_on(block, rig.side);
  rig.device.free(block);
  EXPECT_EQ(rig.device.memory(0).pending_bytes, 0U);
  EXPECT_EQ(rig.allocate(), block);
}

TEST(Memory, AUseOnItsOwnStreamKeepsNothing) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  rig.device.used_on(block, rig.main);
  rig.device.free(block);
  EXPECT_EQ(rig.device.memory(0).pending_bytes, 0U);
}

TEST(Memory, TheLimitIsOfBytesInUse) {
  Rig rig;
  rig.device.set_limit(0, 3 * kBytes);
  unsigned char* const block = rig.allocate(2 * kBytes);
  rig.allocate(kBytes);
  EXPECT_THROW(rig.allocate(1), OutOfMemory);
  rig.device.free(block);
  rig.allocate(kBytes);
  rig.allocate(kBytes);
  EXPECT_THROW(rig.allocate(1), OutOfMemory);
}

TEST(Memory, RunsWhatFreedBlocksWaitForBeforeGivingUp) {
  Rig rig;
  rig.device.set_limit(0, kBytes);
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  rig.fill(block, 7, rig.main);
  rig.order(rig.main, rig.side);
  rig.device.copy(host, block, kBytes, rig.side);
  rig.device.used_on(block, rig.side);
  rig.device.free(block);
  EXPECT_EQ(rig.allocate(), block);
  EXPECT_TRUE(rig.holds(host, 7));
}

TEST(Memory, StreamsGiveBackWhatTheyKeepBeforeSpaceRunsOut) {
  for (const bool done : {false, true}) {
    Rig rig({.capacity_bytes = 4 * kBytes});
    rig.device.set_limit(0, 8 * kBytes);
    std::vector<unsigned char*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(rig.allocate());
    EXPECT_THROW(rig.allocate(), OutOfMemory);
    for (unsigned char* const block : blocks) rig.fill(block, 1, rig.main);
    for (unsigned char* const block : blocks) rig.device.free(block);
    if (done) rig.device.step(rig.main);
    unsigned char* const whole = rig.allocate(4 * kBytes, rig.side);
    rig.fill(whole, 2, rig.side, 4 * kBytes);
    rig.device.synchronize(0);
    EXPECT_TRUE(rig.holds(whole, 2, 4 * kBytes)) << "poison of the freed blocks came after their next use";
    EXPECT_EQ(rig.races(), "");
    EXPECT_THROW(rig.allocate(), OutOfMemory) << "the stream still has what it gave back";
  }
}

TEST(Memory, AStreamJoinsItsOwnBlocksWithoutWaiting) {
  Rig rig({.capacity_bytes = 4 * kBytes});
  std::vector<unsigned char*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(rig.allocate());
  rig.device.copy(rig.pin(), blocks[3], kBytes, rig.side);
  rig.device.free(blocks[1]);
  rig.device.free(blocks[0]);
  EXPECT_EQ(rig.allocate(2 * kBytes), blocks[0]);
  EXPECT_EQ(rig.device.queued(rig.side), 1U);
}

TEST(Memory, CountsWhatIsInUse) {
  Rig rig;
  unsigned char* const first = rig.allocate(1000);
  unsigned char* const second = rig.allocate(500);
  rig.device.free(first);
  MemoryStats stats = rig.device.memory(0);
  EXPECT_EQ(stats.used_bytes, 500U);
  EXPECT_EQ(stats.peak_bytes, 1500U);
  EXPECT_EQ(stats.allocations, 2U);
  rig.device.reset_peak(0);
  EXPECT_EQ(rig.device.memory(0).peak_bytes, 500U);
  rig.device.free(second);

  unsigned char* const host = rig.pin(100);
  EXPECT_EQ(rig.device.memory(0).pinned_bytes, 100U);
  EXPECT_TRUE(rig.device.is_pinned(host + 99));
  EXPECT_FALSE(rig.device.is_pinned(host + 100));
  rig.device.unpin(host);
  stats = rig.device.memory(0);
  EXPECT_EQ(stats.used_bytes, 0U);
  EXPECT_EQ(stats.pinned_bytes, 0U);
  EXPECT_EQ(stats.pin_allocations, 1U);
  EXPECT_FALSE(rig.device.is_pinned(host));
}

TEST(Memory, RefusesWhatIsInNoBlock) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  EXPECT_THROW(rig.device.copy(host, block + 1, kBytes, rig.main), std::invalid_argument);
  EXPECT_THROW(rig.device.copy(host + 1, block, kBytes, rig.main), std::invalid_argument);
  rig.device.free(block);
  EXPECT_THROW(rig.device.copy(host, block, kBytes, rig.main), std::invalid_argument);
  EXPECT_THROW(rig.use(block, rig.main), std::invalid_argument);
  EXPECT_THROW(rig.device.free(block), std::invalid_argument);
  rig.device.unpin(host);
  EXPECT_THROW(rig.device.unpin(host), std::invalid_argument);
  rig.device.free(nullptr);
  rig.device.unpin(nullptr);
}

TEST(Memory, PoisonsNewAndFreedBytesInStreamOrder) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  rig.device.kernel("look", rig.main, {{block, kBytes, false}}, [&] { EXPECT_TRUE(rig.holds(block, kPoisoned)); });
  rig.fill(block, 1, rig.main);
  unsigned char* const host = rig.pin();
  rig.device.copy(host, block, kBytes, rig.main);
  rig.device.free(block);
  EXPECT_TRUE(rig.holds(block, 1)) << "poisoned before what the stream has queued before";
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(host, 1));
  EXPECT_TRUE(rig.holds(block, kPoisoned));
}

TEST(Memory, PoisonCanBeOff) {
  Rig rig({.poison = false});
  unsigned char* const block = rig.allocate();
  rig.fill(block, 1, rig.main);
  rig.device.free(block);
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(block, 1));
}

TEST(Memory, ADistantUseKeepsAPinnedBlockToo) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  std::memset(host, 3, kBytes);
  rig.device.copy(block, host, kBytes, rig.main);
  rig.device.used_on(host, rig.main);
  rig.device.unpin(host);
  EXPECT_TRUE(readable(host));
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(block, 3));
  EXPECT_EQ(rig.races(), "");
  rig.device.unpin(rig.pin());
  EXPECT_FALSE(readable(host)) << "still mapped, though nothing uses it";
}

TEST(Memory, UnpinnedBytesStayMappedForWhatIsQueued) {
  Rig rig;
  unsigned char* const block = rig.allocate();
  unsigned char* const host = rig.pin();
  std::memset(host, 3, kBytes);
  rig.device.copy(block, host, kBytes, rig.main);
  rig.device.unpin(host);
  rig.device.synchronize(rig.main);
  EXPECT_TRUE(rig.holds(block, kPoisoned)) << "the copy found bytes that were given back";
  EXPECT_EQ(rig.races(), "copy H2D on stream 0:0 | unpin\n");
}

}  // namespace
}  // namespace ebbtide::device
