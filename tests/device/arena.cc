#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "address.h"

namespace ebbtide::device {

std::uint64_t page_bytes() {
  static const auto nbytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

std::uint64_t whole_pages(std::uint64_t nbytes) { return (nbytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

Arena::Arena(std::uint64_t capacity_bytes) : nbytes_(whole_pages(capacity_bytes)), opened_(nbytes_ / page_bytes()) {
  void* const memory = ::mmap(nullptr, nbytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "[Arena] mmap");
  begin_ = address_of(memory);
}

Arena::~Arena() { ::munmap(pointer_to(begin_), nbytes_); }

void Arena::open(std::uint64_t begin, std::uint64_t nbytes) {
  if (nbytes == 0) return;
  const std::lock_guard lock(mutex_);
  const std::uint64_t end_page = (begin - begin_ + nbytes - 1) / page_bytes() + 1;
  std::uint64_t closed = (begin - begin_) / page_bytes();  // the pages from here to `page` are to be opened together
  for (std::uint64_t page = closed; page < end_page; ++page) {
    if (opened_[page]++ == 0) continue;
    protect(closed, page, PROT_READ | PROT_WRITE);
    closed = page + 1;
  }
  protect(closed, end_page, PROT_READ | PROT_WRITE);
}

void Arena::close(std::uint64_t begin, std::uint64_t nbytes) {
  if (nbytes == 0) return;
  const std::lock_guard lock(mutex_);
  const std::uint64_t end_page = (begin - begin_ + nbytes - 1) / page_bytes() + 1;
  std::uint64_t unused = (begin - begin_) / page_bytes();
  for (std::uint64_t page = unused; page < end_page; ++page) {
    if (--opened_[page] == 0) continue;
    protect(unused, page, PROT_NONE);
    unused = page + 1;
  }
  protect(unused, end_page, PROT_NONE);
}

void Arena::protect(std::uint64_t first_page, std::uint64_t end_page, int protection) const {
  if (first_page == end_page) return;
  void* const address = pointer_to(begin_ + first_page * page_bytes());
  if (::mprotect(address, (end_page - first_page) * page_bytes(), protection) != 0) {
    throw std::system_error(errno, std::generic_category(), "[Arena] mprotect");
  }
}

}  // namespace ebbtide::device
