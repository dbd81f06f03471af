// Window: the storages saved last, in the order of saving. What leaves it may be copied. It is measured in bytes or in
// groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>

#include "ebbtide/types.h"

namespace ebbtide {

// Not thread safe; O(1) per call.
class Window {
 public:
  void push(StorageId storage, std::uint64_t nbytes, GroupId group = {});
  // More bytes of a storage that is inside; its place in the order stays.
  void grow(StorageId storage, std::uint64_t nbytes);
  // Saved again in a later group: goes to the back, for its memory is in use until that group has ended.
  void move_to(StorageId storage, GroupId group);
  // Returns whether it was inside.
  bool remove(StorageId storage);
  // The oldest storage, taken out, when more than `keep_last_bytes` are inside. The newest stays, however large, unless
  // nothing is to be kept: backward needs it first.
  [[nodiscard]] std::optional<StorageId> pop_over(std::uint64_t keep_last_bytes);
  // The oldest storage, taken out, when its group is before `first_kept`.
  [[nodiscard]] std::optional<StorageId> pop_before(GroupId first_kept);

  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }
  [[nodiscard]] std::size_t storages() const { return order_.size(); }
  [[nodiscard]] bool empty() const { return order_.empty(); }

 private:
  struct Item {
    StorageId storage;
    std::uint64_t nbytes;
    GroupId group;
  };

  std::list<Item> order_;
  std::unordered_map<std::uint64_t, std::list<Item>::iterator> places_;
  std::uint64_t nbytes_ = 0;
};

}  // namespace ebbtide
