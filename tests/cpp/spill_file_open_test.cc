#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "ebbtide/error.h"
#include "ebbtide/spill_file.h"
#include "spill_file_support.h"

namespace ebbtide {
namespace {

using SpillFileOpen = SpillFileTest;

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

}  // namespace
}  // namespace ebbtide
