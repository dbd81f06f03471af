#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ebbtide/error.h"
#include "ebbtide/host_executor.h"

namespace ebbtide {
namespace {

using Bytes = std::vector<std::uint8_t>;

// More than any address space has.
constexpr std::uint64_t kTooMuch = std::uint64_t{1} << 60;

Place place_of(const Bytes& bytes, Tier tier = Tier::kDevice) {
  return {tier, static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(bytes.data())), 0};
}

std::shared_ptr<SpillFile> make_file(std::uint64_t keep_free_bytes = 0) {
  return std::make_shared<SpillFile>(::testing::TempDir(),
                                     SpillOptions{.allow_tmpfs = true, .keep_free_bytes = keep_free_bytes});
}

// Pieces of several storages that are packed together, and memory that they come back to.
class Pack {
 public:
  explicit Pack(unsigned seed, std::size_t storages = 5, std::size_t max_bytes = 5000) {
    std::minstd_rand random(seed);
    for (std::size_t i = 0; i < storages; ++i) {
      Bytes& bytes = saved_.emplace_back(1 + random() % max_bytes);
      for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 8);
      restored_.emplace_back(bytes.size());
      parts_.push_back({place_of(bytes), {{0, bytes.size() / 3}, {bytes.size() / 2, bytes.size()}}});
    }
    layout_ = pack_layout(parts_);
  }

  [[nodiscard]] std::uint64_t nbytes() const { return layout_.nbytes; }
  [[nodiscard]] Plan offload(const Place& block) const { return plan_packed_offload(parts_, layout_, block); }
  [[nodiscard]] Plan restore(const Place& block) const {
    std::vector<LoadPart> loads;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      LoadPart& load = loads.emplace_back(LoadPart{place_of(restored_[i]), {}});
      for (const auto& [range, byte_offset] : layout_.parts[i])
        load.spans.push_back({range, block.advanced(byte_offset)});
    }
    return plan_packed_restore(loads, {{block, layout_.nbytes}});
  }
  [[nodiscard]] bool is_restored() const {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      Bytes expected(saved_[i].size());
      for (const ByteRange& range : parts_[i].ranges.ranges()) {
        std::memcpy(&expected[range.begin], &saved_[i][range.begin], range.nbytes());
      }
      if (restored_[i] != expected) return false;
    }
    return true;
  }
  [[nodiscard]] bool is_untouched() const {
    for (const Bytes& bytes : restored_) {
      if (bytes != Bytes(bytes.size())) return false;
    }
    return true;
  }

 private:
  std::vector<Bytes> saved_;
  std::vector<Bytes> restored_;
  std::vector<PackPart> parts_;
  PackLayout layout_;
};

// The plan with staging so far up that no system has the memory.
Plan with_too_much_staging(Plan plan) {
  for (CopySpan& span : plan) {
    for (Place* const place : {&span.src, &span.dst}) {
      if (place->tier == Tier::kStaging) place->byte_offset += kTooMuch;
    }
  }
  return plan;
}

// An executor with its one client, which makes one copy after the other.
class Client {
 public:
  explicit Client(HostExecutor::Options options = {}) : executor_(options) {}

  std::exception_ptr copy(Plan plan, const std::shared_ptr<SpillFile>& file = nullptr) {
    const CopyId id{++copies_};
    executor_.submit(id, std::move(plan), file, queue_);
    while (!queue_->ready()) std::this_thread::yield();  // not `wait`, which would run the copy here
    const Completion completion = queue_->pop().value();
    EXPECT_EQ(completion.copy, id);
    return completion.error;
  }

 private:
  const std::shared_ptr<CompletionQueue> queue_ = std::make_shared<CompletionQueue>();
  HostExecutor executor_;
  std::uint64_t copies_ = 0;
};

Error error_of(const std::exception_ptr& error) {
  if (error == nullptr) {
    ADD_FAILURE() << "the copy did not fail";
    return {ErrorKind::kDevice, "none"};
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    return thrown;
  }
}

TEST(HostExecutorPack, GoesToHostMemoryAndBack) {
  const Pack pack(1);
  Bytes slab(pack.nbytes());
  Client client;
  EXPECT_EQ(client.copy(pack.offload(place_of(slab, Tier::kHost))), nullptr);
  EXPECT_EQ(client.copy(pack.restore(place_of(slab, Tier::kHost))), nullptr);
  EXPECT_TRUE(pack.is_restored());
}

TEST(HostExecutorPack, GoesToAFileAndBackAsOnePiece) {
  const Pack pack(2);
  const auto file = make_file();
  const Block block = file->allocate(pack.nbytes(), UINT64_MAX).value();
  Client client;
  EXPECT_EQ(client.copy(pack.offload(block.place), file), nullptr);
  EXPECT_EQ(client.copy(pack.restore(block.place), file), nullptr);
  EXPECT_TRUE(pack.is_restored());
  Bytes piece(block.nbytes);
  EXPECT_NO_THROW(file->read(block.place.position(), piece.data(), piece.size()));
}

TEST(HostExecutorPack, FindsAFlippedByteBeforeAnyStorageIsWritten) {
  const Pack pack(3);
  const auto file = make_file();
  const Block block = file->allocate(pack.nbytes(), UINT64_MAX).value();
  Client client;
  ASSERT_EQ(client.copy(pack.offload(block.place), file), nullptr);
  const auto at = static_cast<off_t>(block.place.position() + block.nbytes - 1);
  std::uint8_t byte = 0;
  ASSERT_EQ(::pread(file->descriptor(), &byte, 1, at), 1);
  byte ^= 1;
  ASSERT_EQ(::pwrite(file->descriptor(), &byte, 1, at), 1);
  EXPECT_EQ(error_of(client.copy(pack.restore(block.place), file)).kind(), ErrorKind::kCorruption);
  EXPECT_TRUE(pack.is_untouched());
}

TEST(HostExecutorPack, OnAFullDiskFailsAndGoesOn) {
  const Pack pack(4);
  const auto full = make_file(UINT64_MAX / 2);
  const Block block = full->allocate(pack.nbytes(), UINT64_MAX).value();
  Client client;
  const Error error = error_of(client.copy(pack.offload(block.place), full));
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), ENOSPC);
  EXPECT_EQ(error_of(client.copy(pack.restore(block.place), full)).kind(), ErrorKind::kUsage);
  EXPECT_TRUE(pack.is_untouched());

  Bytes slab(pack.nbytes());
  EXPECT_EQ(client.copy(pack.offload(place_of(slab, Tier::kHost))), nullptr);
  EXPECT_EQ(client.copy(pack.restore(place_of(slab, Tier::kHost))), nullptr);
  EXPECT_TRUE(pack.is_restored());
}

TEST(HostExecutorPack, WithoutMemoryForStagingCopiesHostMemoryDirectly) {
  const Pack pack(5);
  Bytes slab(pack.nbytes());
  const Place block = place_of(slab, Tier::kHost);
  Client client;
  EXPECT_EQ(client.copy(with_too_much_staging(pack.offload(block))), nullptr);
  EXPECT_EQ(client.copy(with_too_much_staging(pack.restore(block))), nullptr);
  EXPECT_TRUE(pack.is_restored());
}

TEST(HostExecutorPack, WithoutMemoryForStagingFailsForAFile) {
  const Pack pack(6);
  const auto file = make_file();
  const Block block = file->allocate(pack.nbytes(), UINT64_MAX).value();
  Client client;
  const Error refused = error_of(client.copy(with_too_much_staging(pack.offload(block.place)), file));
  EXPECT_EQ(refused.kind(), ErrorKind::kHostMemory);
  EXPECT_NE(std::string(refused.what()).find("1.0 EiB"), std::string::npos) << refused.what();
  ASSERT_EQ(client.copy(pack.offload(block.place), file), nullptr) << "a refusal does not last";
  EXPECT_EQ(error_of(client.copy(with_too_much_staging(pack.restore(block.place)), file)).kind(),
            ErrorKind::kHostMemory);
  EXPECT_TRUE(pack.is_untouched());
  EXPECT_EQ(client.copy(pack.restore(block.place), file), nullptr);
  EXPECT_TRUE(pack.is_restored());
}

// One worker stages packs of all sizes one after the other, among them one larger than it keeps memory for.
TEST(HostExecutorPack, StagesPacksOfDifferentSizes) {
  Client client;
  unsigned seed = 0;
  for (const std::size_t max_bytes : {100, 40'000, 100, 12'000'000, 100, 80'000, 10'000}) {
    const Pack pack(++seed, 5, max_bytes);
    Bytes slab(pack.nbytes());
    EXPECT_EQ(client.copy(pack.offload(place_of(slab, Tier::kHost))), nullptr);
    EXPECT_EQ(client.copy(pack.restore(place_of(slab, Tier::kHost))), nullptr);
    EXPECT_TRUE(pack.is_restored()) << max_bytes;
  }
}

TEST(HostExecutorPack, StagesOnTheSubmittingThread) {
  Client client({.inline_bytes = UINT64_MAX});
  const Pack pack(7);
  Bytes slab(pack.nbytes());
  EXPECT_EQ(client.copy(pack.offload(place_of(slab, Tier::kHost))), nullptr);
  EXPECT_EQ(client.copy(pack.restore(place_of(slab, Tier::kHost))), nullptr);
  EXPECT_TRUE(pack.is_restored());
}

// Staging that two threads shared would mix their bytes. Packs are large, so that workers overlap, and only workers run
// them.
TEST(HostExecutorPack, StagesOnSeveralThreadsAtOnce) {
  constexpr std::uint64_t kPacks = 16;
  HostExecutor executor({.threads = 3, .queue_depth = kPacks});
  const auto queue = std::make_shared<CompletionQueue>();
  std::vector<Pack> packs;
  std::vector<Bytes> slabs;
  for (unsigned i = 0; i < kPacks; ++i) {
    packs.emplace_back(i + 1, 5, 400'000);
    slabs.emplace_back(packs.back().nbytes());
  }
  const auto copy_all = [&](auto plan_of) {
    for (std::uint64_t i = 0; i < kPacks; ++i) {
      executor.submit(CopyId{i + 1}, plan_of(packs[i], place_of(slabs[i], Tier::kHost)), nullptr, queue);
    }
    while (executor.pending() > 0) std::this_thread::yield();
    while (const auto completion = queue->pop()) EXPECT_EQ(completion->error, nullptr);
  };
  copy_all([](const Pack& pack, const Place& block) { return pack.offload(block); });
  copy_all([](const Pack& pack, const Place& block) { return pack.restore(block); });
  for (const Pack& pack : packs) EXPECT_TRUE(pack.is_restored());
}

}  // namespace
}  // namespace ebbtide
