// One engine driven by four threads; run it with -fsanitize=thread.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "engine_driver.h"

namespace ebbtide::testing {
namespace {

constexpr int kThreads = 4;

class EngineRace : public ::testing::Test {
 protected:
  EngineRace()
      : driver({.config = {.keep_last_bytes = 512,
                           .prefetch_bytes = 512,
                           .in_flight_bytes = 512,
                           .max_tier_bytes = 2048,
                           .pack_below_bytes = 128,
                           .pack_bytes = 512},
                .tier_capacity = 1 << 16,
                .backing_capacity = 1 << 20,
                .threads = true}) {}

  template <class Body>
  static void on_threads(Body body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
    for (std::thread& thread : threads) thread.join();
  }

  Storage filled(std::uint64_t nbytes, std::uint8_t seed) {
    Storage storage = driver.device.allocate(nbytes);
    write(storage, seed);
    return storage;
  }

  Driver driver;
};

TEST_F(EngineRace, FourThreadsOverOneEngine) {
  on_threads([&](int thread) {
    std::mt19937 random(static_cast<std::uint32_t>(thread));
    for (std::uint64_t step = 1; step <= 30; ++step) {
      const EpochId epoch = driver.begin_epoch();
      const PassId pass{step * kThreads + static_cast<std::uint64_t>(thread)};
      std::vector<Saved> saved;
      for (int i = 0; i < 10; ++i) {
        Storage storage = filled(64 + 64 * (random() % 3), static_cast<std::uint8_t>(random()));
        saved.push_back(driver.pack(storage, bytes_view(0, 32), epoch));
        saved.push_back(driver.pack(std::move(storage), bytes_view(16, 64), epoch));
      }
      driver.end_epoch(epoch);
      while (!saved.empty()) {
        if (random() % 8 != 0) {
          EXPECT_TRUE(driver.unpack(saved.back(), pass));
        }
        driver.drop(saved.back());
        saved.pop_back();
      }
      driver.end_pass(pass);
    }
  });
  EXPECT_GT(driver.engine.stats().h2d_copies, 0u);
  driver.expect_at_rest();
}

TEST_F(EngineRace, FourThreadsOverTheSameStorages) {
  constexpr int kStorages = 6;
  for (std::uint64_t step = 1; step <= 30; ++step) {
    const EpochId epoch = driver.begin_epoch();
    std::vector<Storage> shared;
    for (int i = 0; i < kStorages; ++i) shared.push_back(filled(128, static_cast<std::uint8_t>(step + i)));
    std::vector<std::vector<Saved>> saved(kThreads);
    on_threads([&](int thread) {
      for (const Storage& storage : std::vector<Storage>(shared)) {
        saved[thread].push_back(driver.pack(storage, bytes_view(16 * thread, 64 + 16 * thread), epoch));
      }
    });
    shared.clear();
    driver.end_epoch(epoch);
    on_threads([&](int thread) {
      for (int i = kStorages - 1; i >= 0; --i) {
        // The first load of some storage fails for whoever was first.
        if (thread == 0 && i == 2) driver.fail_next_copies(1);
        Storage found;
        while ((found = driver.unpack(saved[thread][i], PassId{step})) == nullptr) {
        }
        driver.drop(saved[thread][i]);
      }
    });
    driver.fail_next_copies(0);
    driver.end_pass(PassId{step});
    driver.expect_at_rest();
  }
}

}  // namespace
}  // namespace ebbtide::testing
