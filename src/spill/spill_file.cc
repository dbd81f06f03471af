#include "ebbtide/spill_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <system_error>
#include <type_traits>

#include "ebbtide/checksum.h"
#include "ebbtide/error.h"

namespace ebbtide {
namespace {

constexpr std::uint64_t kAlignment = 4096;  // of extents in the file, and of pages
// The kernel moves at most 2 GiB - 4 KiB per call.
constexpr std::uint64_t kMaxTransferBytes = std::uint64_t{1} << 30;
// Hashed and moved piece by piece, so that bytes come out of memory once. Each piece's checksum is the next one's seed.
constexpr std::uint64_t kChunkBytes = std::uint64_t{256} << 10;
constexpr std::uint64_t kMaxFileBytes = std::numeric_limits<off_t>::max() / kAlignment * kAlignment;

std::string reason(int os_error) { return std::generic_category().message(os_error); }

std::string bytes_at(std::uint64_t nbytes, std::uint64_t position) {
  return format_bytes(nbytes) + " at byte " + std::to_string(position);
}

std::string checked_directory(const std::string& directory) {
  std::error_code failure;
  const std::filesystem::path path = std::filesystem::canonical(directory, failure);
  if (failure) {
    throw Error(ErrorKind::kSpill,
                "[SpillFile] \"" + directory + "\": " + failure.message() + ": create it or choose another directory",
                failure.value());
  }
  if (!std::filesystem::is_directory(path, failure)) {
    throw Error(ErrorKind::kSpill, "[SpillFile] " + path.string() + " is not a directory: choose a directory", ENOTDIR);
  }
  return path.string();
}

// File systems without O_TMPFILE say so with several errors, so every failure goes on to the second way, which then
// has the last word.
int open_unnamed(const std::string& directory) {
  const int unnamed = ::open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (unnamed >= 0) return unnamed;
  std::string name = directory + "/.ebbtide-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  int os_error = errno;
  if (named >= 0) {
    if (::unlink(name.c_str()) == 0) return named;
    os_error = errno;
    ::close(named);
  }
  throw Error(ErrorKind::kSpill,
              "[SpillFile] no file can be made in " + directory + ": " + reason(os_error) +
                  ": make it writable or choose another directory",
              os_error);
}

template <class Void, class Call>
void for_each_chunk(Void* data, std::uint64_t nbytes, const Call& call) {
  using Char = std::conditional_t<std::is_const_v<Void>, const char, char>;
  auto* bytes = static_cast<Char*>(data);
  for (std::uint64_t offset = 0; offset < nbytes; offset += kChunkBytes) {
    call(offset, bytes + offset, std::min(kChunkBytes, nbytes - offset));
  }
}

// Memory just mapped is faulted in by one call instead of page by page during the read. Only a hint: the kernel may
// refuse it, or not know it.
void fault_in(void* data, std::uint64_t nbytes) {
#ifdef MADV_POPULATE_WRITE
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kAlignment - 1) / kAlignment * kAlignment;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + nbytes) / kAlignment * kAlignment;
  if (end > begin) static_cast<void>(::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE));
#else
  static_cast<void>(data), static_cast<void>(nbytes);
#endif
}

// Name of the file system of `fd` when it keeps its bytes in memory, else null.
const char* memory_file_system(int fd) {
  struct statfs info {};
  if (::fstatfs(fd, &info) != 0) return nullptr;
  const auto magic = static_cast<std::uint32_t>(info.f_type);
  if (magic == TMPFS_MAGIC) return "tmpfs";
  if (magic == RAMFS_MAGIC) return "ramfs";
  return nullptr;
}

}  // namespace

SpillFile::SpillFile(const std::string& directory, SpillOptions options)
    : directory_(checked_directory(directory)), options_(options), extents_(0, kAlignment) {
  fd_ = open_unnamed(directory_);
  const char* memory = options_.allow_tmpfs ? nullptr : memory_file_system(fd_);
  if (memory == nullptr) return;
  ::close(fd_);
  throw Error(ErrorKind::kSpill, "[SpillFile] " + directory_ + " is in memory (" + memory +
                                     "): choose a directory on a disk or set allow_tmpfs");
}

SpillFile::~SpillFile() { ::close(fd_); }

std::optional<Block> SpillFile::allocate(std::uint64_t nbytes, std::uint64_t limit) {
  if (nbytes > kMaxFileBytes) return std::nullopt;
  const std::lock_guard lock(mutex_);
  auto offset = extents_.allocate(nbytes);
  if (!offset) {
    // No free extent is long enough, so the free tail is shorter than the block.
    const std::uint64_t growth = extents_.padded(nbytes) - extents_.free_tail_bytes();
    const std::uint64_t bound = std::min(limit, kMaxFileBytes);
    if (extents_.capacity() > bound || growth > bound - extents_.capacity()) return std::nullopt;
    extents_.grow(growth);
    offset = extents_.allocate(nbytes);
  }
  used_ += nbytes;
  return Block{Place{Tier::kFile, 0, *offset}, nbytes};
}

void SpillFile::free(const Block& block) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t position = block.place.position();
  extents_.free(position, block.nbytes);
  forget(position, position + block.nbytes);
  used_ -= block.nbytes;
}

std::uint64_t SpillFile::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::uint64_t SpillFile::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return extents_.capacity();
}

void SpillFile::write(std::uint64_t position, const void* data, std::uint64_t nbytes) {
  const std::shared_lock writing(writing_);
  const std::uint64_t end = position + nbytes;
  std::uint64_t growth = 0;
  {
    const std::lock_guard lock(mutex_);
    forget(position, end);
    growth = end - std::min(end, written_end_);
  }
  if (growth > 0) require_free_space(growth);
  Record record{nbytes, 0};
  for_each_chunk(data, nbytes, [&](std::uint64_t offset, const char* chunk, std::uint64_t chunk_bytes) {
    record.checksum = checksum(chunk, chunk_bytes, record.checksum);
    write_all(position + offset, chunk, chunk_bytes);
  });
  const std::lock_guard lock(mutex_);
  written_end_ = std::max(written_end_, end);
  records_[position] = record;
}

void SpillFile::read(std::uint64_t position, void* data, std::uint64_t nbytes) {
  Record record;
  {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(position);
    if (found == records_.end() || found->second.nbytes != nbytes) {
      throw Error(ErrorKind::kUsage, "[SpillFile.read] " + bytes_at(nbytes, position) +
                                         " were not written: read exactly what one write wrote");
    }
    record = found->second;
  }
  fault_in(data, nbytes);
  std::uint64_t found_checksum = 0;
  for_each_chunk(data, nbytes, [&](std::uint64_t offset, char* chunk, std::uint64_t chunk_bytes) {
    read_all(position + offset, chunk, chunk_bytes);
    found_checksum = checksum(chunk, chunk_bytes, found_checksum);
  });
  if (found_checksum == record.checksum) return;
  throw Error(ErrorKind::kCorruption, "[SpillFile.read] " + bytes_at(nbytes, position) + " in " + directory_ +
                                          " are not what was written: check the disk, or choose another directory");
}

bool SpillFile::trim() {
  // A write in progress uses the file; trim does not wait for it.
  const std::unique_lock writing(writing_, std::try_to_lock);
  if (!writing) return false;
  {
    const std::lock_guard lock(mutex_);
    if (used_ != 0) return false;
    extents_ = ExtentAllocator(0, kAlignment);
  }
  if (::ftruncate(fd_, 0) != 0) return false;
  const std::lock_guard lock(mutex_);
  written_end_ = 0;
  return true;
}

void SpillFile::require_free_space(std::uint64_t growth) const {
  struct statvfs info {};
  if (::fstatvfs(fd_, &info) != 0) {
    const int os_error = errno;
    throw Error(ErrorKind::kSpill,
                "[SpillFile.write] free space of " + directory_ + " is unknown: " + reason(os_error) +
                    ": choose another directory",
                os_error);
  }
  if (info.f_blocks == 0) return;  // a file system without a size, such as ramfs
  const std::uint64_t free = std::uint64_t{info.f_bavail} * info.f_frsize;
  if (growth <= free && options_.keep_free_bytes <= free - growth) return;
  throw Error(ErrorKind::kSpill,
              "[SpillFile.write] " + format_bytes(growth) + " more asked, " + format_bytes(free) + " free in " +
                  directory_ + ", " + format_bytes(options_.keep_free_bytes) +
                  " to be kept free: free disk space or choose another directory",
              ENOSPC);
}

void SpillFile::write_all(std::uint64_t position, const void* data, std::uint64_t nbytes) const {
  const auto* bytes = static_cast<const char*>(data);
  for (std::uint64_t done = 0; done < nbytes;) {
    const std::uint64_t chunk = std::min(nbytes - done, kMaxTransferBytes);
    const ssize_t moved = ::pwrite(fd_, bytes + done, chunk, static_cast<off_t>(position + done));
    if (moved > 0) {
      done += static_cast<std::uint64_t>(moved);
      continue;
    }
    const int os_error = moved == 0 ? EIO : errno;
    if (os_error == EINTR) continue;
    throw Error(ErrorKind::kSpill,
                "[SpillFile.write] " + format_bytes(done) + " of " + bytes_at(nbytes, position) + " written in " +
                    directory_ + ": " + reason(os_error) + ": free disk space or choose another directory",
                os_error);
  }
}

void SpillFile::read_all(std::uint64_t position, void* data, std::uint64_t nbytes) const {
  auto* bytes = static_cast<char*>(data);
  for (std::uint64_t done = 0; done < nbytes;) {
    const std::uint64_t chunk = std::min(nbytes - done, kMaxTransferBytes);
    const ssize_t moved = ::pread(fd_, bytes + done, chunk, static_cast<off_t>(position + done));
    if (moved > 0) {
      done += static_cast<std::uint64_t>(moved);
      continue;
    }
    const int os_error = moved == 0 ? 0 : errno;
    if (os_error == EINTR) continue;
    throw Error(ErrorKind::kSpill,
                "[SpillFile.read] " + format_bytes(done) + " of " + bytes_at(nbytes, position) + " read in " +
                    directory_ + ": " + (moved == 0 ? "the file ends early" : reason(os_error)) +
                    ": check the disk, or choose another directory",
                os_error);
  }
}

void SpillFile::forget(std::uint64_t begin, std::uint64_t end) {
  records_.erase(records_.lower_bound(begin), records_.lower_bound(end));
}

}  // namespace ebbtide
