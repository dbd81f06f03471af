#include "ebbtide/window.h"

#include <iterator>

namespace ebbtide {

void Window::push(StorageId storage, std::uint64_t nbytes) {
  order_.push_back({storage, nbytes});
  places_[value(storage)] = std::prev(order_.end());
  nbytes_ += nbytes;
}

void Window::grow(StorageId storage, std::uint64_t nbytes) {
  const auto found = places_.find(value(storage));
  if (found == places_.end()) return;
  found->second->nbytes += nbytes;
  nbytes_ += nbytes;
}

bool Window::remove(StorageId storage) {
  const auto found = places_.find(value(storage));
  if (found == places_.end()) return false;
  nbytes_ -= found->second->nbytes;
  order_.erase(found->second);
  places_.erase(found);
  return true;
}

std::optional<StorageId> Window::pop_over(std::uint64_t keep_last_bytes) {
  if (order_.empty() || nbytes_ <= keep_last_bytes) return std::nullopt;
  const StorageId oldest = order_.front().storage;
  remove(oldest);
  return oldest;
}

}  // namespace ebbtide
