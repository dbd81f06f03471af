// Random graphs of aliases, groups, orders, streams, writes, holders, failures and drops against a model that knows the
// right bytes: each ticket carries what was saved, and is asked for only as long as nobody wrote to its memory, as
// plain autograd demands.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ebbtide/error.h"
#include "engine_driver.h"
#include "stream_driver.h"

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
  std::uint64_t identity = 0;  // of the storage that was saved

  [[nodiscard]] bool readable() const { return content->writes == writes; }
};

class RandomSession {
 public:
  RandomSession(std::uint32_t seed, bool streams) : random_(seed), streams_(streams), options_(options()) {
    if (streams) driver_ = std::make_unique<StreamDriver>(options_);
    if (!streams) driver_ = std::make_unique<Driver>(options_);
    driver_->growths_allowed = static_cast<int>(one_of({1000, 1000, 3}));
    epoch_ = driver_->begin_epoch();
  }

  void step() {
    check_bounds();
    switch (below(26)) {
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
        driver_->end_epoch(epoch_);
        epoch_ = driver_->begin_epoch();
        return;
      case 18:
        if (below(3) != 0) return;
        driver_->end_pass(passes_[below(2)] = PassId{++last_pass_});
        return;
      case 19:
      case 20:
        return group();
      case 21:
        return streams_ ? change_stream() : fail();
      case 22:
        return recover();
      case 23:
      case 24:
        return run();
      default:
        return backward();
    }
  }

  void finish() {
    while (!packed_.empty()) drop();
    tensors_.clear();
    for (std::uint64_t pass = 1; pass <= last_pass_; ++pass) driver_->end_pass(PassId{pass});
    driver_->complete_all();
    driver_->expect_at_rest();
    const Stats stats = driver_->engine.stats();
    EXPECT_EQ(stats.saved_tensors, packs_);
    EXPECT_LE(stats.d2h_bytes, stats.unique_bytes) << "a byte crossed the link twice";
    EXPECT_LE(driver_->tier_full, 1);
    const std::vector<GroupStats> groups = driver_->engine.group_stats();
    const auto sum = [&](std::uint64_t GroupStats::*of) {
      return std::accumulate(groups.begin(), groups.end(), std::uint64_t{0},
                             [of](std::uint64_t total, const GroupStats& group) { return total + group.*of; });
    };
    EXPECT_EQ(sum(&GroupStats::storages), stats.storages);
    EXPECT_EQ(sum(&GroupStats::unique_bytes), stats.unique_bytes);
    EXPECT_EQ(sum(&GroupStats::d2h_bytes), stats.d2h_bytes);
    EXPECT_EQ(sum(&GroupStats::h2d_bytes), stats.h2d_bytes);
  }

  [[nodiscard]] Stats stats() const { return driver_->engine.stats(); }
  std::uint64_t unpacked = 0;
  std::uint64_t refused = 0;

 private:
  DriverOptions options() {
    constexpr std::uint64_t kAny = UINT64_MAX;
    DriverOptions options;
    options.config = {.min_bytes = one_of({0, 0, 16}),
                      .keep_last_bytes = one_of({0, 0, 128, 1024}),
                      .prefetch_bytes = one_of({0, 256, 2048}),
                      .in_flight_bytes = one_of({0, 300, kAny}),
                      .max_tier_bytes = one_of({kAny, 2000, 700}),
                      .pack_below_bytes = one_of({0, 64, 200}),
                      .pack_bytes = one_of({200, 1000}),
                      .probes_per_save = static_cast<std::uint32_t>(one_of({0, 1, 2, 8}))};
    if (below(2) == 0) options.config.keep_last_groups = below(3);
    if (below(2) == 0) options.config.prefetch_groups = below(3);
    options.tier_capacity = one_of({1 << 16, 1 << 16, 1024});
    options.backing_capacity = one_of({0, 1024, 1 << 16});
    options.device_capacity = one_of({1 << 20, 1 << 20, 5000});
    options.grows = below(3) == 0;
    options.hold_copies = streams_ || below(4) != 0;
    options.config.prefetch_to_peak = below(2) == 0;
    return options;
  }

  void check_bounds() {
    EXPECT_LE(driver_->space->used_bytes(), options_.config.max_tier_bytes);
    EXPECT_EQ(driver_->space->used_bytes(), stats().tier_bytes);
    if (driver_->backing != nullptr) {
      EXPECT_EQ(driver_->backing->used_bytes(), stats().backing_bytes);
    }
  }

  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  std::uint64_t one_of(const std::vector<std::uint64_t>& values) { return values[below(values.size())]; }
  template <class T>
  T* pick(std::vector<T>& from) {
    return from.empty() ? nullptr : &from[below(from.size())];
  }

  void make() {
    Storage storage = driver_->device.allocate(1 + below(256), 16 * below(32), stream_);
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
    used_here(*tensor->storage);
    write(tensor->storage, static_cast<std::uint8_t>(below(256)), content.counters[one], stream_);
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
    const std::uint64_t identity = storage->ref.identity;
    used_here(*storage);
    if (last_use) forget(tensor);
    packed_.push_back({driver_->pack(std::move(storage), view, epoch_, stream_, content->counters[one],
                                     in_group_ ? label_ : 0, any_run()),
                       content, content->writes, identity});
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
    ++unpacked;
    const bool failing = !streams_ && below(16) == 0;
    if (failing) driver_->fail_next_copies(1);
    const std::size_t failures = driver_->load_failures.size();
    const PassId pass = below(12) == 0 ? PassId{} : passes_[below(2)];
    Storage storage;
    try {
      storage = driver_->unpack(packed.saved, pass, stream_);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDevice);
      EXPECT_TRUE(streams_ && failed_offloads_ > 0) << "bytes were lost and nothing had failed";
      ++refused;
      return;
    }
    driver_->fail_next_copies(0);
    if (storage == nullptr) {
      ++refused;
      EXPECT_TRUE(failing || failed_ || driver_->device.used_bytes() > 2000 || driver_->load_failures.size() > failures)
          << "it could have been loaded";
      failed_ = false;
      return;
    }
    // Somebody keeps it, writes to it, or saves it again.
    const bool kept = below(4) == 0 && storage->ref.nbytes > 0;
    if (kept || storage->ref.identity == packed.identity) used_here(*storage);
    if (kept) tensors_.push_back({std::move(storage), packed.content});
  }

  void backward() {
    if (below(4) != 0) return;
    while (!packed_.empty()) {
      if (below(8) != 0) unpack(packed_.back());
      drop(packed_.size() - 1);
    }
    driver_->end_pass(passes_[0]);
  }

  void drop() {
    if (!packed_.empty()) drop(below(packed_.size()));
  }

  void drop(std::size_t which) {
    std::swap(packed_[which], packed_.back());
    const Packed packed = std::move(packed_.back());
    packed_.pop_back();
    driver_->drop(packed.saved);
  }

  void complete() {
    const std::vector<CopyId> held = driver_->held();
    if (held.empty()) return;
    const CopyId copy = held[below(held.size())];
    const bool ok = below(16) != 0;
    if (!ok && driver_->command(copy).hop == Hop::kOffload) ++failed_offloads_;
    driver_->complete(copy, ok);
  }

  void group() {
    if (in_group_) {
      driver_->end_group();
    } else {
      driver_->begin_group(epoch_, label_ = 1 + below(4));
    }
    in_group_ = !in_group_;
  }

  SavedIn any_run() {
    if (runs_.empty() || below(2) == 0) return {};
    return {.run = runs_[below(runs_.size())], .on_request = below(8) == 0};
  }

  void run() {
    if (runs_.size() < 3 || below(8) == 0) runs_.push_back(driver_->open_run(1 + below(4)));
    if (runs_.size() > 4) {
      if (below(2) == 0) driver_->close_run(runs_.front());
      runs_.erase(runs_.begin());
    }
    const RunId run = runs_[below(runs_.size())];
    switch (below(8)) {
      case 0:
        return driver_->let_go_run(run);
      case 1:
      case 2:
        return driver_->load_run(run);
      case 3:
        return driver_->order_after_run(run, stream_);
      case 4:
        return driver_->release_run(run);
      case 5:
        if (below(4) == 0) driver_->keep_run(run);
        return;
      case 6:
        if (Tensor* tensor = pick(tensors_)) driver_->request(run, tensor->storage->ref.identity);
        return;
      default:
        return driver_->offload_run(run);
    }
  }

  // The next copy, whatever it is; or an allocation.
  void fail() {
    if (below(4) != 0) return;
    failed_ = true;
    below(2) == 0 ? driver_->fail_next_copies(1) : driver_->fail_allocation(static_cast<int>(1 + below(4)));
  }

  void change_stream() {
    const StreamRef before = std::exchange(stream_, stream_ == kMain ? kSide : kMain);
    dynamic_cast<StreamDriver&>(*driver_).user_order(before, stream_);
  }

  // What users owe an allocator: it does not know of other streams than the first.
  void used_here(const FakeStorage& storage) {
    if (streams_) dynamic_cast<StreamDriver&>(*driver_).user_record_stream(storage, stream_);
  }

  void recover() {
    if (below(8) != 0) return;
    if (!streams_ && below(2) == 0) driver_->lose_copies();
    in_group_ = false;
    driver_->recover();
  }

  std::mt19937 random_;
  const bool streams_;
  const DriverOptions options_;
  std::unique_ptr<Driver> driver_;
  EpochId epoch_{};
  StreamRef stream_ = streams_ ? kMain : StreamRef{};
  std::uint64_t last_pass_ = 2;
  PassId passes_[2] = {PassId{1}, PassId{2}};
  std::vector<Tensor> tensors_;
  std::vector<Packed> packed_;
  std::uint64_t packs_ = 0;
  std::vector<RunId> runs_;
  std::size_t label_ = 0;
  bool in_group_ = false;
  bool failed_ = false;
  std::uint64_t failed_offloads_ = 0;
};

// EBBTIDE_RANDOM_SEEDS and EBBTIDE_RANDOM_FIRST run more, or others.
std::uint32_t from_environment(const char* name, std::uint32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

class EngineRandom : public ::testing::TestWithParam<bool> {};

TEST_P(EngineRandom, EveryRestoreYieldsTheSavedBytesAndAtRestAllIsZero) {
  const std::uint32_t first = from_environment("EBBTIDE_RANDOM_FIRST", 1);
  const std::uint32_t seeds = from_environment("EBBTIDE_RANDOM_SEEDS", GetParam() ? 60 : 200);
  Stats total;
  std::uint64_t unpacked = 0;
  std::uint64_t refused = 0;
  for (std::uint32_t seed = first; seed < first + seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomSession run(seed, GetParam());
    for (int i = 0; i < 400 && !HasFailure(); ++i) run.step();
    run.finish();
    if (HasFailure()) return;
    total.h2d_copies += run.stats().h2d_copies;
    total.live_hits += run.stats().live_hits;
    total.prefetch_hits += run.stats().prefetch_hits;
    total.spilled_bytes += run.stats().spilled_bytes;
    unpacked += run.unpacked;
    refused += run.refused;
  }
  EXPECT_GT(total.h2d_copies, 2 * seeds);
  EXPECT_GT(total.live_hits, 3 * seeds);
  EXPECT_GT(total.prefetch_hits, seeds / 3);
  EXPECT_GT(total.spilled_bytes, 10 * seeds);
  EXPECT_LT(refused, unpacked / 10);
}

INSTANTIATE_TEST_SUITE_P(Streams, EngineRandom, ::testing::Bool());

}  // namespace
}  // namespace ebbtide::testing
