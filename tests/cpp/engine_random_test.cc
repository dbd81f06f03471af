// Random graphs of aliases, orders, writes, holders and drops against a model that knows the right bytes: each ticket
// carries what was saved, and is asked for only as long as nobody wrote to its memory, as plain autograd demands.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "engine_driver.h"

namespace ebbtide::testing {
namespace {

// One content, wherever it is: in the saved storage or in a restored one.
struct Content {
  std::uint64_t writes = 0;
  std::vector<std::shared_ptr<Counter>> counters;
  std::map<StorageId, unsigned> seen;  // by entry, the counters (bits) of its saves
};

struct Tensor {
  Storage storage;
  std::shared_ptr<Content> content;
};

struct Packed {
  Saved saved;
  std::shared_ptr<Content> content;
  std::uint64_t writes = 0;

  [[nodiscard]] bool readable() const { return content->writes == writes; }
};

class RandomSession {
 public:
  explicit RandomSession(std::uint32_t seed) : random_(seed), driver_(options()) {}

  void step() {
    switch (below(20)) {
      case 0:
      case 1:
      case 2:
        return make();
      case 3:
      case 4:
      case 5:
      case 6:
        return pack();
      case 7:
        return write_to(pick(tensors_));
      case 8:
      case 9:
        return let_go();
      case 10:
      case 11:
      case 12:
      case 13:
        return unpack();
      case 14:
      case 15:
        return drop();
      case 16:
        return complete();
      case 17:
        if (below(4) != 0) return;
        driver_.end_epoch(epoch_);
        epoch_ = driver_.begin_epoch();
        return;
      case 18:
        if (below(3) != 0) return;
        driver_.end_pass(passes_[below(2)] = PassId{++last_pass_});
        return;
      default:
        return backward();
    }
  }

  void finish() {
    while (!packed_.empty()) drop();
    tensors_.clear();
    for (std::uint64_t pass = 1; pass <= last_pass_; ++pass) driver_.end_pass(PassId{pass});
    driver_.complete_all();
    driver_.expect_at_rest();
    const Stats stats = driver_.engine.stats();
    EXPECT_EQ(stats.saved_tensors, packs_);
    EXPECT_LE(stats.d2h_bytes, stats.unique_bytes) << "a byte crossed the link twice";
    EXPECT_LE(driver_.tier_full, 1);
  }

  [[nodiscard]] Stats stats() const { return driver_.engine.stats(); }

 private:
  DriverOptions options() {
    constexpr std::uint64_t kAny = UINT64_MAX;
    DriverOptions options;
    options.config = {.min_bytes = one_of({0, 0, 16}),
                      .keep_last_bytes = one_of({0, 0, 128, 1024}),
                      .prefetch_bytes = one_of({0, 256, 2048}),
                      .in_flight_bytes = one_of({0, 300, kAny}),
                      .max_tier_bytes = one_of({kAny, 2000}),
                      .probes_per_save = static_cast<std::uint32_t>(one_of({0, 1, 2, 8}))};
    options.tier_capacity = one_of({1 << 16, 1 << 16, 1000});
    options.device_capacity = one_of({1 << 20, 1 << 20, 5000});
    options.hold_copies = below(4) != 0;
    return options;
  }

  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  std::uint64_t one_of(const std::vector<std::uint64_t>& values) { return values[below(values.size())]; }
  template <class T>
  T* pick(std::vector<T>& from) {
    return from.empty() ? nullptr : &from[below(from.size())];
  }

  void make() {
    Storage storage = driver_.device.allocate(1 + below(256), 16 * below(32));
    if (storage == nullptr) return let_go();
    auto content = std::make_shared<Content>();
    content->counters = {storage->counter, std::make_shared<Counter>(0)};
    tensors_.push_back({std::move(storage), std::move(content)});
    write_to(&tensors_.back());
  }

  // Through one counter only, where every entry has seen that one: a write that no counter shows is nobody's to find.
  void write_to(Tensor* tensor) {
    if (tensor == nullptr) return;
    Content& content = *tensor->content;
    ++content.writes;
    const unsigned one = any_counter();
    write(tensor->storage, static_cast<std::uint8_t>(below(256)), content.counters[one]);
    const auto shows = [one](const auto& entry) { return (entry.second >> one & 1) != 0; };
    if (!std::ranges::all_of(content.seen, shows)) ++*content.counters[1 - one];
  }

  unsigned any_counter() { return below(4) == 0 ? 1 : 0; }

  ViewMeta any_view(std::uint64_t nbytes) {
    const auto n = static_cast<std::int64_t>(nbytes);
    const auto offset = static_cast<std::int64_t>(below(nbytes));
    const std::int64_t count = 1 + static_cast<std::int64_t>(below(nbytes - static_cast<std::uint64_t>(offset)));
    switch (below(6)) {
      case 0:
        return {offset, 1, 0, {1000, count}, {0, 1}};  // expanded
      case 1:
        return {n - 1, 1, 0, {n}, {-1}};  // flipped
      case 2:
        return {offset, 1, 0, {(count + 1) / 2}, {2}};  // every second byte
      case 3:
        return {offset, 1, 1, {0, count}, {count, 1}};  // empty
      case 4:
        return bytes_view(0, nbytes);
      default:
        return {offset, 1, 0, {count}, {1}};
    }
  }

  void pack() {
    Tensor* tensor = pick(tensors_);
    if (tensor == nullptr) return;
    const bool last_use = below(2) == 0;
    const std::shared_ptr<Content> content = tensor->content;
    const unsigned one = any_counter();
    const ViewMeta view = any_view(tensor->storage->ref.nbytes);
    Storage storage = tensor->storage;
    if (last_use) forget(tensor);
    packed_.push_back(
        {driver_.pack(std::move(storage), view, epoch_, {}, content->counters[one]), content, content->writes});
    ++packs_;
    const Saved& saved = packed_.back().saved;
    if (saved.outcome != SaveOutcome::kKept) content->seen[saved.storage] |= 1u << one;
  }

  void let_go() {
    if (Tensor* tensor = pick(tensors_)) forget(tensor);
  }

  void forget(Tensor* tensor) {
    std::swap(*tensor, tensors_.back());
    tensors_.pop_back();
  }

  void unpack() {
    if (Packed* packed = pick(packed_)) unpack(*packed);
  }

  void unpack(const Packed& packed) {
    if (!packed.readable()) return;
    const bool failing = below(16) == 0;
    if (failing) driver_.fail_next_copies(1);
    const PassId pass = below(12) == 0 ? PassId{} : passes_[below(2)];
    Storage storage = driver_.unpack(packed.saved, pass);
    driver_.fail_next_copies(0);
    if (storage == nullptr) {
      EXPECT_TRUE(failing || driver_.device.used_bytes() > 2000) << "it could have been loaded";
      return;
    }
    // Somebody keeps it, writes to it, or saves it again.
    if (below(4) == 0 && storage->ref.nbytes > 0) tensors_.push_back({std::move(storage), packed.content});
  }

  void backward() {
    if (below(4) != 0) return;
    while (!packed_.empty()) {
      if (below(8) != 0) unpack(packed_.back());
      drop(packed_.size() - 1);
    }
    driver_.end_pass(passes_[0]);
  }

  void drop() {
    if (!packed_.empty()) drop(below(packed_.size()));
  }

  void drop(std::size_t which) {
    std::swap(packed_[which], packed_.back());
    const Packed packed = std::move(packed_.back());
    packed_.pop_back();
    driver_.drop(packed.saved);
  }

  void complete() {
    const std::vector<CopyId> held = driver_.held();
    if (!held.empty()) driver_.complete(held[below(held.size())], below(16) != 0);
  }

  std::mt19937 random_;
  Driver driver_;
  EpochId epoch_ = driver_.begin_epoch();
  std::uint64_t last_pass_ = 2;
  PassId passes_[2] = {PassId{1}, PassId{2}};
  std::vector<Tensor> tensors_;
  std::vector<Packed> packed_;
  std::uint64_t packs_ = 0;
};

TEST(EngineRandom, EveryRestoreYieldsTheSavedBytesAndAtRestAllIsZero) {
  std::uint64_t loads = 0;
  std::uint64_t live = 0;
  std::uint64_t hits = 0;
  for (std::uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomSession run(seed);
    for (int i = 0; i < 400 && !HasFailure(); ++i) run.step();
    run.finish();
    if (HasFailure()) return;
    loads += run.stats().h2d_copies;
    live += run.stats().live_hits;
    hits += run.stats().prefetch_hits;
  }
  EXPECT_GT(loads, 1000u);
  EXPECT_GT(live, 1000u);
  EXPECT_GT(hits, 100u);
}

}  // namespace
}  // namespace ebbtide::testing
