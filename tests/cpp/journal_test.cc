#include "ebbtide/journal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <variant>
#include <vector>

#include "engine_driver.h"

namespace ebbtide::testing {
namespace {

DriverOptions options() {
  return {.config = {.keep_last_bytes = 256,
                     .prefetch_bytes = 256,
                     .in_flight_bytes = 256,
                     .pack_below_bytes = 128,
                     .pack_bytes = 256},
          .tier_capacity = 4096,
          .backing_capacity = 2048,
          .hold_copies = true,
          .record = true};
}

Journal random_run(std::uint32_t seed) {
  Driver driver(options());
  std::mt19937 random(seed);
  const auto below = [&](std::uint32_t n) { return random() % n; };
  for (std::uint64_t step = 1; step <= 6; ++step) {
    const EpochId epoch = driver.begin_epoch();
    std::vector<Saved> saved;
    for (int i = 0; i < 12; ++i) {
      if (i % 4 == 0) driver.begin_group(epoch, 1 + below(3));
      Storage storage = driver.device.allocate(64 + 64 * below(4), 64 * below(8));
      write(storage, static_cast<std::uint8_t>(below(256)));
      saved.push_back(driver.pack(storage, bytes_view(0, 64), epoch));
      saved.push_back(driver.pack(storage, bytes_view(below(32), 64), epoch));
      storage.reset();
      if (below(4) == 0) driver.complete_all();
      if (i % 4 == 3) driver.end_group();
    }
    driver.end_epoch(epoch);
    while (!saved.empty()) {
      const std::size_t which = below(2) == 0 ? saved.size() - 1 : below(static_cast<std::uint32_t>(saved.size()));
      if (below(5) != 0) {
        EXPECT_NE(driver.unpack(saved[which], PassId{step}), nullptr);
      }
      driver.drop(saved[which]);
      saved.erase(saved.begin() + static_cast<std::ptrdiff_t>(which));
    }
    driver.end_pass(PassId{step});
    driver.complete_all();
  }
  driver.expect_at_rest();
  return driver.journal;
}

std::optional<Divergence> replay_afresh(const Journal& journal) {
  const DriverOptions same = options();
  Engine engine(same.config, std::make_shared<FakeSpace>(same.tier_capacity),
                std::make_shared<FakeSpace>(same.backing_capacity, Tier::kFile));
  return replay(journal, engine);
}

TEST(Journal, ReplaysWithoutDivergence) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    const Journal journal = random_run(seed);
    EXPECT_GT(journal.size(), 500u);
    const std::optional<Divergence> divergence = replay_afresh(journal);
    ASSERT_FALSE(divergence) << "seed " << seed << ", call " << divergence->index << "\nexpected:\n"
                             << divergence->expected << "found:\n"
                             << divergence->found;
  }
}

TEST(Journal, FindsATamperedAnswer) {
  Journal journal = random_run(1);
  const std::size_t at = journal.size() / 2;
  journal[at].answer += "wait copy 1\n";
  const std::optional<Divergence> divergence = replay_afresh(journal);
  ASSERT_TRUE(divergence);
  EXPECT_EQ(divergence->index, at);
  EXPECT_EQ(divergence->found + "wait copy 1\n", divergence->expected);
}

TEST(Journal, FindsACallThatIsMissing) {
  Journal journal = random_run(2);
  const auto is_save = [](const JournalEntry& entry) { return std::holds_alternative<SaveRequest>(entry.call); };
  journal.erase(std::ranges::find_if(journal, is_save));
  EXPECT_TRUE(replay_afresh(journal));
}

TEST(Journal, AnswersAreTextAndErrorsToo) {
  Engine engine({.min_bytes = 128}, std::make_shared<FakeSpace>(1024));
  EXPECT_EQ(answer(engine, calls::BeginEpoch{}), "1");
  EXPECT_EQ(answer(engine, calls::Kept{KeepReason::kPolicy, 8}), "");
  EXPECT_EQ(answer(engine, SaveRequest{.storage = {DeviceId{0}, 1, 0x1000, 64}, .view = bytes_view(0, 64)}),
            "kept small\n");
  EXPECT_EQ(answer(engine, calls::Restore{TicketId{4}, PassId{1}, false, false, {}}).substr(0, 32),
            "error: [Engine.restore] ticket 4");
  EXPECT_EQ(answer(engine, calls::EndEpoch{EpochId{1}}), "");
}

}  // namespace
}  // namespace ebbtide::testing
