#include "ebbtide/spill_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ebbtide/error.h"

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

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

constexpr std::uint64_t kNoLimit = UINT64_MAX;
constexpr uid_t kNobody = 65534;
// Temporary directories are often in memory; only the tests of that check depend on it.
constexpr SpillOptions kAnywhere{.allow_tmpfs = true, .keep_free_bytes = 0};

Bytes some_bytes(std::size_t nbytes, unsigned seed = 1) {
  Bytes bytes(nbytes);
  std::minstd_rand random(seed);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 8);
  return bytes;
}

void write(SpillFile& file, const Block& block, const Bytes& bytes) {
  file.write(block.place.position(), bytes.data(), bytes.size());
}

Bytes read(SpillFile& file, const Block& block) {
  Bytes bytes(block.nbytes);
  file.read(block.place.position(), bytes.data(), bytes.size());
  return bytes;
}

// The error that `call` throws.
Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kUsage, "");
}

Error open_error(const std::string& directory, SpillOptions options = kAnywhere) {
  return error_of([&] { SpillFile(directory, options); });
}

// Exit status of a child that runs `body`; -1 when a signal ended it.
int exit_status_of(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(125);
    }
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class SpillFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/ebbtide-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = fs::canonical(name).string();
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string directory_;
};

using SpillFileOpen = SpillFileTest;
using SpillFileErrors = SpillFileTest;

TEST_F(SpillFileOpen, RefusesAnAbsentDirectory) {
  const Error error = open_error(directory_ + "/absent");
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), ENOENT);
  EXPECT_NE(std::string(error.what()).find(directory_ + "/absent"), std::string::npos) << error.what();
  EXPECT_EQ(open_error("").kind(), ErrorKind::kSpill);
}

TEST_F(SpillFileOpen, RefusesAFile) {
  const std::string file = directory_ + "/file";
  std::ofstream(file) << "content";
  const Error error = open_error(file);
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_EQ(error.os_error(), ENOTDIR);
  EXPECT_EQ(error.what(), "[SpillFile] " + file + " is not a directory: choose a directory");
}

TEST_F(SpillFileOpen, RefusesADirectoryThatItMayNotWriteTo) {
  fs::permissions(directory_,
                  fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
  const int status = exit_status_of([&] {
    if (::geteuid() == 0 && ::seteuid(kNobody) != 0) return 2;
    const Error error = open_error(directory_);
    return error.kind() == ErrorKind::kSpill && error.os_error() == EACCES ? 0 : 1;
  });
  fs::permissions(directory_, fs::perms::owner_all);
  if (status == 2) GTEST_SKIP() << "root, which may write everywhere, cannot become another user here";
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(SpillFileOpen, RefusesMemoryUnlessAllowed) {
  struct statfs info {};
  if (::statfs("/dev/shm", &info) != 0 || info.f_type != TMPFS_MAGIC || ::access("/dev/shm", W_OK) != 0) {
    GTEST_SKIP() << "/dev/shm is no writable tmpfs here";
  }
  const Error error = open_error("/dev/shm", {});
  EXPECT_EQ(error.kind(), ErrorKind::kSpill);
  EXPECT_STREQ(error.what(),
               "[SpillFile] /dev/shm is in memory (tmpfs): choose a directory on a disk or set allow_tmpfs");

  SpillFile file("/dev/shm", kAnywhere);
  const auto block = file.allocate(5000, kNoLimit).value();
  const Bytes bytes = some_bytes(5000);
  write(file, block, bytes);
  EXPECT_EQ(read(file, block), bytes);
}

TEST_F(SpillFileOpen, RefusedDirectoriesLeakNoDescriptor) {
  const int before = ::dup(0);
  ::close(before);
  for (const std::string& directory : {directory_ + "/absent", std::string("/dev/shm"), std::string("/proc")}) {
    try {
      SpillFile(directory, {});
    } catch (const Error&) {
    }
  }
  const int after = ::dup(0);
  ::close(after);
  EXPECT_EQ(before, after);
}

TEST_F(SpillFileOpen, NamesItsDirectoryAbsolutely) {
  fs::create_directory(directory_ + "/inner");
  EXPECT_EQ(SpillFile(directory_ + "/inner/../", kAnywhere).directory(), directory_);
  const auto relative = fs::relative(directory_);
  EXPECT_EQ(SpillFile(relative.string(), kAnywhere).directory(), directory_);
}

TEST_F(SpillFileOpen, LeavesNothingInTheDirectory) {
  SpillFile file(directory_, kAnywhere);
  EXPECT_TRUE(fs::is_empty(directory_));
  write(file, file.allocate(100, kNoLimit).value(), some_bytes(100));
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(SpillFileOpen, IsPrivateAndNotInherited) {
  const SpillFile file(directory_, kAnywhere);
  struct stat info {};
  ASSERT_EQ(::fstat(file.descriptor(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_EQ(info.st_nlink, 0u);
  EXPECT_NE(::fcntl(file.descriptor(), F_GETFD) & FD_CLOEXEC, 0);
}

// Makes openat fail for O_TMPFILE as on a file system without it.
bool deny_unnamed_files() {
  constexpr unsigned kUnnamed = O_TMPFILE & ~O_DIRECTORY;
  constexpr unsigned kFlags =
      offsetof(seccomp_data, args) + 2 * sizeof(std::uint64_t) + (std::endian::native == std::endian::big ? 4 : 0);
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kFlags),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kUnnamed, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_F(SpillFileOpen, WorksWhereFilesNeedAName) {
  const int status = exit_status_of([&] {
    if (!deny_unnamed_files()) return 2;
    if (::open(directory_.c_str(), O_TMPFILE | O_RDWR, 0600) >= 0 || errno != EOPNOTSUPP) return 3;
    SpillFile file(directory_, kAnywhere);
    struct stat info {};
    if (::fstat(file.descriptor(), &info) != 0 || (info.st_mode & 07777) != 0600 || info.st_nlink != 0) return 4;
    const auto block = file.allocate(5000, kNoLimit).value();
    const Bytes bytes = some_bytes(5000);
    write(file, block, bytes);
    return fs::is_empty(directory_) && read(file, block) == bytes ? 0 : 5;
  });
  if (status == 2) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(SpillFileOpen, AKilledProcessLeavesNoFile) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    SpillFile file(directory_, kAnywhere);
    write(file, file.allocate(1 << 16, kNoLimit).value(), some_bytes(1 << 16));
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  ::close(ready[1]);
  char signal = 0;
  EXPECT_EQ(::read(ready[0], &signal, 1), 1);
  ::close(ready[0]);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(fs::is_empty(directory_));
}

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
