#include "ebbtide/spill_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ebbtide/error.h"
#include "spill_file_support.h"

namespace {
std::function<void()> before_ftruncate;
}

// Stands before the C library's, so that a test can step in between the two halves of a trim.
extern "C" int ftruncate(int fd, off_t nbytes) noexcept {
  if (before_ftruncate) before_ftruncate();
  return static_cast<int>(::syscall(SYS_ftruncate, fd, nbytes));
}

namespace ebbtide {
namespace {

using SpillFileErrors = SpillFileTest;

TEST_F(SpillFileTest, TwoFilesShareADirectory) {
  SpillFile one(directory_, kAnywhere);
  SpillFile two(directory_, kAnywhere);
  const auto block_one = one.allocate(1000, kNoLimit).value();
  const auto block_two = two.allocate(1000, kNoLimit).value();
  write(one, block_one, some_bytes(1000, 1));
  write(two, block_two, some_bytes(1000, 2));
  EXPECT_EQ(read(one, block_one), some_bytes(1000, 1));
  EXPECT_EQ(read(two, block_two), some_bytes(1000, 2));
}

TEST_F(SpillFileTest, AllocatesAlignedBlocksUpToTheLimit) {
  SpillFile file(directory_, kAnywhere);
  const auto first = file.allocate(1, 3 * 4096).value();
  const auto second = file.allocate(4097, 3 * 4096).value();
  EXPECT_EQ(first, (Block{Place{Tier::kFile, 0, 0}, 1}));
  EXPECT_EQ(second, (Block{Place{Tier::kFile, 0, 4096}, 4097}));
  EXPECT_EQ(file.used_bytes(), 4098u);
  EXPECT_EQ(file.reserved_bytes(), 3u * 4096);
  EXPECT_FALSE(file.allocate(1, 3 * 4096));
  EXPECT_FALSE(file.allocate(kNoLimit, kNoLimit));
  EXPECT_FALSE(file.allocate(std::uint64_t{INT64_MAX}, kNoLimit));

  // The free tail counts: two pages more, one of them added.
  file.free(second);
  const auto third = file.allocate(3 * 4096, 4 * 4096).value();
  EXPECT_EQ(third.place.byte_offset, 4096u);
  EXPECT_EQ(file.reserved_bytes(), 4u * 4096);
  // A hole serves a block though the file is already longer than the limit.
  file.free(first);
  EXPECT_EQ(file.allocate(4096, 0).value().place.byte_offset, 0u);
}

TEST_F(SpillFileTest, BlockMayHoldSeveralWrites) {
  SpillFile file(directory_, kAnywhere);
  const auto block = file.allocate(300, kNoLimit).value();
  const auto at = block.place.position();
  const Bytes bytes = some_bytes(300);
  file.write(at, bytes.data(), 100);
  file.write(at + 100, bytes.data() + 100, 200);
  Bytes back(300);
  file.read(at + 100, back.data() + 100, 200);
  file.read(at, back.data(), 100);
  EXPECT_EQ(back, bytes);

  // Reading across two writes, or a part of one, could not be verified.
  EXPECT_EQ(error_of([&] { file.read(at, back.data(), 300); }).kind(), ErrorKind::kUsage);
  EXPECT_EQ(error_of([&] { file.read(at + 1, back.data(), 99); }).kind(), ErrorKind::kUsage);

  file.free(block);
  EXPECT_EQ(error_of([&] { file.read(at, back.data(), 100); }).kind(), ErrorKind::kUsage);
  EXPECT_EQ(error_of([&] { file.read(at + 100, back.data(), 200); }).kind(), ErrorKind::kUsage);
}

TEST_F(SpillFileTest, TrimsOnlyAnUnusedFile) {
  SpillFile file(directory_, kAnywhere);
  const auto block = file.allocate(1 << 20, kNoLimit).value();
  write(file, block, some_bytes(1 << 20));
  EXPECT_FALSE(file.trim());
  EXPECT_EQ(read(file, block), some_bytes(1 << 20));

  file.free(block);
  EXPECT_EQ(file.reserved_bytes(), 1u << 20);
  EXPECT_TRUE(file.trim());
  EXPECT_EQ(file.reserved_bytes(), 0u);
  struct stat info {};
  ASSERT_EQ(::fstat(file.descriptor(), &info), 0);
  EXPECT_EQ(info.st_size, 0);
  EXPECT_EQ(info.st_blocks, 0);

  const auto again = file.allocate(5000, kNoLimit).value();
  write(file, again, some_bytes(5000, 2));
  EXPECT_EQ(read(file, again), some_bytes(5000, 2));
}

TEST_F(SpillFileTest, MovesNothingForZeroBytes) {
  SpillFile file(directory_, kAnywhere);
  file.write(0, nullptr, 0);
  file.read(0, nullptr, 0);
  EXPECT_EQ(fs::file_size("/proc/self/fd/" + std::to_string(file.descriptor())), 0u);
}

TEST_F(SpillFileErrors, KeepsSpaceFree) {
  SpillFile file(directory_, {.allow_tmpfs = true, .keep_free_bytes = UINT64_MAX});
  const auto block = file.allocate(4096, kNoLimit).value();
  const Error error = error_of([&] { write(file, block, some_bytes(4096)); });
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), ENOSPC);
  EXPECT_NE(std::string(error.what()).find(directory_), std::string::npos) << error.what();
  EXPECT_EQ(fs::file_size("/proc/self/fd/" + std::to_string(file.descriptor())), 0u);
}

TEST_F(SpillFileErrors, ReportsAFullDevice) {
  SpillFile file(directory_, kAnywhere);
  const auto block = file.allocate(4096, kNoLimit).value();
  write(file, block, some_bytes(4096, 1));
  const int keep = ::dup(file.descriptor());
  const int full = ::open("/dev/full", O_RDWR | O_CLOEXEC);
  ASSERT_GE(full, 0);
  ASSERT_EQ(::dup2(full, file.descriptor()), file.descriptor());
  const Error error = error_of([&] { write(file, block, some_bytes(4096, 2)); });
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), ENOSPC);

  // How much of the new bytes arrived is unknown, so neither they nor the old ones are given out.
  ASSERT_EQ(::dup2(keep, file.descriptor()), file.descriptor());
  EXPECT_EQ(error_of([&] { read(file, block); }).kind(), ErrorKind::kUsage);
  write(file, block, some_bytes(4096, 3));
  EXPECT_EQ(read(file, block), some_bytes(4096, 3));
  ::close(keep);
  ::close(full);
}

// The write stops short at the limit, so the second call of the loop fails.
TEST_F(SpillFileErrors, ReportsAFileThatMayNotGrow) {
  const int status = exit_status_of([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{8192, 8192};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    SpillFile file(directory_, kAnywhere);
    const auto fits = file.allocate(4096, kNoLimit).value();
    write(file, fits, some_bytes(4096));
    const auto block = file.allocate(8192, kNoLimit).value();
    const Error error = error_of([&] { write(file, block, some_bytes(8192)); });
    if (error.kind() != ErrorKind::kSpill || error.os_error() != EFBIG) return 3;
    if (std::string(error.what()).find("4.0 KiB of 8.0 KiB") == std::string::npos) return 4;
    return read(file, fits) == some_bytes(4096) ? 0 : 5;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(SpillFileErrors, ReportsADescriptorThatCannotDoIt) {
  SpillFile file(directory_, kAnywhere);
  const auto block = file.allocate(4096, kNoLimit).value();
  write(file, block, some_bytes(4096));
  const std::string self = "/proc/self/fd/" + std::to_string(file.descriptor());
  const int read_only = ::open(self.c_str(), O_RDONLY | O_CLOEXEC);
  const int write_only = ::open(self.c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(read_only, 0);
  ASSERT_GE(write_only, 0);

  ASSERT_EQ(::dup2(write_only, file.descriptor()), file.descriptor());
  Error error = error_of([&] { read(file, block); });
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), EBADF);

  ASSERT_EQ(::dup2(read_only, file.descriptor()), file.descriptor());
  EXPECT_EQ(read(file, block), some_bytes(4096));
  error = error_of([&] { write(file, block, some_bytes(4096)); });
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), EBADF);
  ::close(read_only);
  ::close(write_only);
}

TEST_F(SpillFileErrors, ReportsAnEarlyEnd) {
  SpillFile file(directory_, kAnywhere);
  const auto block = file.allocate(8192, kNoLimit).value();
  write(file, block, some_bytes(8192));
  ASSERT_EQ(::ftruncate(file.descriptor(), 8191), 0);
  const Error error = error_of([&] { read(file, block); });
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_NE(std::string(error.what()).find("the file ends early"), std::string::npos) << error.what();
}

TEST_F(SpillFileErrors, FindsAFlippedByte) {
  SpillFile file(directory_, kAnywhere);
  const auto first = file.allocate(5000, kNoLimit).value();
  const auto second = file.allocate(5000, kNoLimit).value();
  Bytes bytes = some_bytes(5000);
  write(file, first, bytes);
  write(file, second, bytes);
  const std::uint8_t flipped = bytes[4321] ^ 0x10;
  ASSERT_EQ(::pwrite(file.descriptor(), &flipped, 1, static_cast<off_t>(second.place.position() + 4321)), 1);
  const Error error = error_of([&] { read(file, second); });
  EXPECT_EQ(error.kind(), ErrorKind::kCorruption);
  EXPECT_NE(std::string(error.what()).find(directory_), std::string::npos) << error.what();
  EXPECT_EQ(read(file, first), bytes);
}

TEST_F(SpillFileTest, AgreesWithAModel) {
  struct Held {
    Block block;
    Bytes bytes;
  };
  constexpr std::uint64_t kLimit = 2 << 20;
  SpillFile file(directory_, kAnywhere);
  std::mt19937 random(20240229);
  std::vector<Held> model;
  const auto any_of_model = [&] { return model.begin() + static_cast<std::ptrdiff_t>(random() % model.size()); };
  unsigned refused = 0;
  unsigned trimmed = 0;
  for (unsigned step = 0; step < 4000; ++step) {
    // Phases that mostly grow and phases that mostly shrink, down to nothing.
    const bool shrink = step / 500 % 2 == 1;
    const int action = static_cast<int>(random() % 8);
    if (action < (shrink ? 1 : 4)) {
      const std::uint64_t nbytes = 1 + random() % (random() % 8 == 0 ? 300'000 : 9'000);
      if (const auto block = file.allocate(nbytes, kLimit)) {
        ASSERT_EQ(block->nbytes, nbytes);
        model.push_back({*block, some_bytes(nbytes, step)});
        write(file, model.back().block, model.back().bytes);
      } else {
        ++refused;
      }
    } else if (model.empty()) {
      ASSERT_TRUE(file.trim());
      ASSERT_EQ(file.reserved_bytes(), 0u);
      ++trimmed;
    } else if (action < (shrink ? 2 : 5)) {
      const auto held = any_of_model();
      held->bytes = some_bytes(held->bytes.size(), step);
      write(file, held->block, held->bytes);
    } else if (action < (shrink ? 3 : 6)) {
      const auto held = any_of_model();
      ASSERT_EQ(read(file, held->block), held->bytes);
      ASSERT_FALSE(file.trim());
    } else {
      const auto held = any_of_model();
      ASSERT_EQ(read(file, held->block), held->bytes);
      file.free(held->block);
      model.erase(held);
    }
    const auto used = std::accumulate(model.begin(), model.end(), std::uint64_t{0},
                                      [](std::uint64_t sum, const Held& held) { return sum + held.block.nbytes; });
    ASSERT_EQ(file.used_bytes(), used);
    ASSERT_LE(used, file.reserved_bytes());
    ASSERT_LE(file.reserved_bytes(), kLimit);
  }
  for (const Held& held : model) EXPECT_EQ(read(file, held.block), held.bytes);
  EXPECT_GT(refused, 0u);
  EXPECT_GT(trimmed, 0u);
}

TEST_F(SpillFileTest, ServesManyThreads) {
  SpillFile file(directory_, kAnywhere);
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&file, thread] {
      for (unsigned round = 0; round < 60; ++round) {
        const Bytes bytes = some_bytes(1 + (round * 997 + thread * 131) % 20'000, thread * 1000 + round);
        const auto block = file.allocate(bytes.size(), kNoLimit).value();
        write(file, block, bytes);
        EXPECT_EQ(read(file, block), bytes);
        file.free(block);
        file.trim();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(file.used_bytes(), 0u);
  EXPECT_TRUE(file.trim());
}

TEST_F(SpillFileTest, TrimNeverCutsAWriteThatComesMeanwhile) {
  SpillFile file(directory_, kAnywhere);
  const auto block = file.allocate(5000, kNoLimit).value();
  write(file, block, some_bytes(5000, 1));
  file.free(block);
  Block again;
  std::atomic<bool> written = false;
  std::thread writer;
  before_ftruncate = [&] {
    writer = std::thread([&] {
      again = file.allocate(5000, kNoLimit).value();
      write(file, again, some_bytes(5000, 2));
      written = true;
    });
    for (int turn = 0; turn < 10'000 && !written; ++turn) std::this_thread::yield();
  };
  EXPECT_TRUE(file.trim());
  before_ftruncate = nullptr;
  writer.join();
  EXPECT_EQ(read(file, again), some_bytes(5000, 2));
}

}  // namespace
}  // namespace ebbtide
