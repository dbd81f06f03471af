// SpillFile: one anonymous file for bytes that do not fit into memory.
//
// The file is opened without a name where the file system can (O_TMPFILE), else made with a private name and unlinked
// at once: it vanishes with the process however that ends, and two processes may share a directory. Mode 0600.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>

#include "ebbtide/block_space.h"
#include "ebbtide/extent_allocator.h"

namespace ebbtide {

struct SpillOptions {
  bool allow_tmpfs = false;
  // Free bytes that must remain on the file system after a write that makes the file longer.
  std::uint64_t keep_free_bytes = std::uint64_t{64} << 20;
};

// As a BlockSpace it hands out extents (no I/O; `limit` bounds the file's length). `write` and `read` do the I/O; both
// are thread safe, for disjoint extents also at the same time.
class SpillFile final : public BlockSpace {
 public:
  // Throws Error(kSpill) when the directory is absent, not a directory, not writable, or in memory (tmpfs, ramfs)
  // without allow_tmpfs. Nothing is left behind.
  explicit SpillFile(const std::string& directory, SpillOptions options = {});
  ~SpillFile() override;

  [[nodiscard]] Tier tier() const override { return Tier::kFile; }
  [[nodiscard]] std::optional<Block> allocate(std::uint64_t nbytes, std::uint64_t limit) override;
  // Drops the checksums of the extent. Once nothing is used any more the file may be cut by `trim`.
  void free(const Block& block) override;
  [[nodiscard]] std::uint64_t used_bytes() const override;
  [[nodiscard]] std::uint64_t reserved_bytes() const override;

  // Writes all bytes, through short writes and EINTR, and remembers their checksum under `position`. Blocks on I/O.
  // Throws Error(kSpill) with errno on failure (ENOSPC also when keep_free_bytes would be touched); what stood at
  // `position` before can then not be read any more.
  void write(std::uint64_t position, const void* data, std::uint64_t nbytes);
  // Reads what one `write` wrote: same position and length. Blocks on I/O. Throws Error(kSpill) on I/O errors and on an
  // early end of file, Error(kCorruption) when the checksum differs, Error(kUsage) when no such write is on record.
  void read(std::uint64_t position, void* data, std::uint64_t nbytes);

  // Gives the disk blocks of an unused file back to the file system; returns whether it did.
  bool trim();

  [[nodiscard]] const std::string& directory() const { return directory_; }
  // For tests that flip bytes or read the file's state; -1 is never returned.
  [[nodiscard]] int descriptor() const { return fd_; }

 private:
  // What one `write` left in the file.
  struct Record {
    std::uint64_t nbytes = 0;
    std::uint64_t checksum = 0;
  };

  void require_free_space(std::uint64_t growth) const;
  void write_all(std::uint64_t position, const void* data, std::uint64_t nbytes) const;
  void read_all(std::uint64_t position, void* data, std::uint64_t nbytes) const;
  void forget(std::uint64_t begin, std::uint64_t end);

  const std::string directory_;
  const SpillOptions options_;
  int fd_ = -1;
  std::shared_mutex writing_;  // shared by writes, exclusive in trim; taken before mutex_
  mutable std::mutex mutex_;   // never held across I/O
  ExtentAllocator extents_;
  std::uint64_t used_ = 0;
  std::uint64_t written_end_ = 0;
  std::map<std::uint64_t, Record> records_;  // by position
};

}  // namespace ebbtide
