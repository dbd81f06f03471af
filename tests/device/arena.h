// The address space of one device: unreadable but for the pages that somebody has open. Thread safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace ebbtide::device {

std::uint64_t page_bytes();
std::uint64_t whole_pages(std::uint64_t nbytes);

class Arena {
 public:
  explicit Arena(std::uint64_t capacity_bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  [[nodiscard]] std::uint64_t begin() const { return begin_; }
  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }
  [[nodiscard]] bool holds(std::uint64_t address) const { return address >= begin_ && address - begin_ < nbytes_; }

  // Counted per page: each `open` needs its `close`, of the same bytes.
  void open(std::uint64_t begin, std::uint64_t nbytes);
  void close(std::uint64_t begin, std::uint64_t nbytes);

 private:
  void protect(std::uint64_t first_page, std::uint64_t end_page, int protection) const;

  std::mutex mutex_;
  std::uint64_t nbytes_;
  std::uint64_t begin_;
  std::vector<std::uint32_t> opened_;  // by page
};

}  // namespace ebbtide::device
