// What the tests of the spill file share: a directory of their own, bytes, errors, children.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ebbtide/error.h"
#include "ebbtide/spill_file.h"

namespace ebbtide {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

inline constexpr std::uint64_t kNoLimit = UINT64_MAX;
inline constexpr uid_t kNobody = 65534;
// Temporary directories are often in memory; only the tests of that check depend on it.
inline constexpr SpillOptions kAnywhere{.allow_tmpfs = true, .keep_free_bytes = 0};

inline Bytes some_bytes(std::size_t nbytes, unsigned seed = 1) {
  Bytes bytes(nbytes);
  std::minstd_rand random(seed);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 8);
  return bytes;
}

inline void write(SpillFile& file, const Block& block, const Bytes& bytes) {
  file.write(block.place.position(), bytes.data(), bytes.size());
}

inline Bytes read(SpillFile& file, const Block& block) {
  Bytes bytes(block.nbytes);
  file.read(block.place.position(), bytes.data(), bytes.size());
  return bytes;
}

// The error that `call` throws.
inline Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kUsage, "");
}

inline Error open_error(const std::string& directory, SpillOptions options = kAnywhere) {
  return error_of([&] { SpillFile(directory, options); });
}

// Exit status of a child that runs `body`; -1 when a signal ended it.
inline int exit_status_of(const std::function<int()>& body) {
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

}  // namespace ebbtide
