#include "ebbtide/malloc_threshold.h"

#include <algorithm>
#include <limits>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace ebbtide {

bool fix_malloc_threshold(std::uint64_t nbytes) {
#ifdef __GLIBC__
  const auto limit = static_cast<std::uint64_t>(std::numeric_limits<int>::max());
  return mallopt(M_MMAP_THRESHOLD, static_cast<int>(std::min(nbytes, limit))) == 1;
#else
  static_cast<void>(nbytes);
  return false;
#endif
}

}  // namespace ebbtide
