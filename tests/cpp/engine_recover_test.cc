// After an exception cut the session short: what it never reported is given up, and everything works again.
#include <gtest/gtest.h>

#include <memory>

#include "ebbtide/engine.h"
#include "ebbtide/host_pool.h"

namespace ebbtide {
namespace {

constexpr std::uint64_t kLimit = 1 << 20;

std::shared_ptr<HostPool> make_pool() { return std::make_shared<HostPool>(make_pageable_slab_source(), 1 << 16); }

SaveRequest request(std::uint64_t identity) {
  return {.storage = {DeviceId{0}, identity, identity * 4096, 64},
          .view = {0, 1, 0, {64}, {1}},
          .version = 0,
          .epoch = EpochId{1}};
}

const Command* find(const Commands& commands, CommandKind kind) {
  for (const Command& command : commands) {
    if (command.kind == kind) return &command;
  }
  return nullptr;
}

TEST(EngineRecover, LooksAgainAtAStorageWhoseProbeWasLost) {
  Engine engine({.in_flight_bytes = kLimit}, make_pool());
  const SaveVerdict saved = engine.save(request(1));
  ASSERT_NE(find(saved.commands, CommandKind::kProbe), nullptr);
  EXPECT_TRUE(engine.recover({}).empty());
  EXPECT_NE(find(engine.end_epoch(EpochId{1}), CommandKind::kProbe), nullptr);
}

TEST(EngineRecover, KeepsAStorageWhoseCopyWasNeverStarted) {
  const auto pool = make_pool();
  Engine engine({.in_flight_bytes = kLimit}, pool);
  const SaveVerdict saved = engine.save(request(1));
  ASSERT_NE(find(engine.probed(saved.storage, {}), CommandKind::kCopy), nullptr);
  EXPECT_TRUE(engine.recover({}).empty());
  EXPECT_EQ(pool->used_bytes(), 0u);
  EXPECT_EQ(engine.stats().device_bytes, 64u);
  EXPECT_EQ(engine.restore(saved.ticket, PassId{1}, true, false).outcome, RestoreOutcome::kLive);
  EXPECT_NE(find(engine.drop(saved.ticket), CommandKind::kForget), nullptr);
}

TEST(EngineRecover, LeavesACopyAloneThatWillBeReported) {
  Engine engine({.in_flight_bytes = kLimit}, make_pool());
  const SaveVerdict saved = engine.save(request(1));
  const Commands commands = engine.probed(saved.storage, {});
  const CopyId copy = find(commands, CommandKind::kCopy)->copy;
  EXPECT_TRUE(engine.recover({copy}).empty());
  EXPECT_NE(find(engine.completed(copy, true, {ProbeAnswer{}}), CommandKind::kReleaseLease), nullptr);
}

TEST(EngineRecover, LoadsAnewWhatWasNeverAllocatedOrNeverLoaded) {
  Engine engine({.in_flight_bytes = kLimit}, make_pool());
  const SaveVerdict saved = engine.save(request(1));
  const CopyId copy = find(engine.probed(saved.storage, {}), CommandKind::kCopy)->copy;
  ASSERT_FALSE(engine.completed(copy, true, {ProbeAnswer{}}).empty());
  ASSERT_EQ(engine.restore(saved.ticket, PassId{1}, false, false).outcome, RestoreOutcome::kLoad);
  ASSERT_EQ(engine.restore(saved.ticket, PassId{1}, false, false).outcome, RestoreOutcome::kPending);
  EXPECT_TRUE(engine.recover({}).empty());
  const RestoreVerdict again = engine.restore(saved.ticket, PassId{2}, false, false);
  ASSERT_EQ(again.outcome, RestoreOutcome::kLoad);
  ASSERT_FALSE(engine.allocated(saved.storage, again.load, {DeviceId{0}, 9, 4096 * 9, 64}, {}).empty());
  EXPECT_NE(find(engine.recover({}), CommandKind::kReleaseRestored), nullptr);
  EXPECT_EQ(engine.restore(saved.ticket, PassId{3}, false, false).outcome, RestoreOutcome::kLoad);
}

TEST(EngineRestore, ALiveHitWaitsForTheCopyThatReadsTheStorage) {
  Engine engine({.in_flight_bytes = kLimit}, make_pool());
  const SaveVerdict saved = engine.save(request(1));
  const CopyId copy = find(engine.probed(saved.storage, {}), CommandKind::kCopy)->copy;
  const RestoreVerdict verdict = engine.restore(saved.ticket, PassId{1}, true, false);
  ASSERT_NE(find(verdict.commands, CommandKind::kWait), nullptr);
  EXPECT_EQ(find(verdict.commands, CommandKind::kWait)->copy, copy);
}

}  // namespace
}  // namespace ebbtide
