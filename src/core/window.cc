#include "ebbtide/window.h"

#include <iterator>

namespace ebbtide {

void Window::push(StorageId storage, std::uint64_t nbytes, GroupId group) {
  order_.push_back({storage, nbytes, group});
  places_[value(storage)] = std::prev(order_.end());
  nbytes_ += nbytes;
}

void Window::grow(StorageId storage, std::uint64_t nbytes) {
  const auto found = places_.find(value(storage));
  if (found == places_.end()) return;
  found->second->nbytes += nbytes;
  nbytes_ += nbytes;
}

void Window::move_to(StorageId storage, GroupId group) {
  const auto found = places_.find(value(storage));
  if (found == places_.end()) return;
  found->second->group = group;
  order_.splice(order_.end(), order_, found->second);
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
  if (order_.size() == 1 && keep_last_bytes > 0) return std::nullopt;
  const StorageId oldest = order_.front().storage;
  remove(oldest);
  return oldest;
}

std::optional<StorageId> Window::pop_before(GroupId first_kept) {
  if (order_.empty() || order_.front().group >= first_kept) return std::nullopt;
  const StorageId oldest = order_.front().storage;
  remove(oldest);
  return oldest;
}

}  // namespace ebbtide
