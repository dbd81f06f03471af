// Window: the storages saved last, in the order of saving. What leaves it may be copied.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>

#include "ebbtide/types.h"

namespace ebbtide {

// Not thread safe; O(1) per call.
class Window {
 public:
  void push(StorageId storage, std::uint64_t nbytes);
  // More bytes of a storage that is inside; its place in the order stays.
  void grow(StorageId storage, std::uint64_t nbytes);
  // Returns whether it was inside.
  bool remove(StorageId storage);
  // The oldest storage, taken out, when more than `keep_last_bytes` are inside.
  [[nodiscard]] std::optional<StorageId> pop_over(std::uint64_t keep_last_bytes);

  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }
  [[nodiscard]] bool empty() const { return order_.empty(); }

 private:
  struct Item {
    StorageId storage;
    std::uint64_t nbytes;
  };

  std::list<Item> order_;
  std::unordered_map<std::uint64_t, std::list<Item>::iterator> places_;
  std::uint64_t nbytes_ = 0;
};

}  // namespace ebbtide
