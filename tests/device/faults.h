#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device.h"

namespace ebbtide::device {

std::string to_string(Operation operation);

struct Strike {
  std::string cause;
  bool sticky = false;
};

// Calls that are to fail, counted down. Not thread safe.
class Faults {
 public:
  void arm(Operation operation, std::uint64_t nth, bool sticky);
  void clear() { armed_.clear(); }
  // Counts a call; tells how it fails, if it does.
  [[nodiscard]] std::optional<Strike> count(Operation operation);

 private:
  struct Armed {
    Operation operation{};
    std::uint64_t nth = 0;
    std::uint64_t left = 0;
    bool sticky = false;
  };
  std::vector<Armed> armed_;
};

}  // namespace ebbtide::device
