#include "faults.h"

#include <stdexcept>

namespace ebbtide::device {

std::string to_string(Operation operation) {
  switch (operation) {
    case Operation::kAllocate:
      return "allocate";
    case Operation::kPin:
      return "pin";
    case Operation::kCopy:
      return "copy";
    case Operation::kRecord:
      return "record";
    case Operation::kWait:
      return "wait";
    case Operation::kSynchronize:
      return "synchronize";
    case Operation::kRunCopy:
      return "run copy";
  }
  return "?";
}

void Faults::arm(Operation operation, std::uint64_t nth, bool sticky) {
  if (nth == 0) throw std::invalid_argument("[Device.fail] calls are counted from 1");
  armed_.push_back({operation, nth, nth, sticky});
}

std::optional<Strike> Faults::count(Operation operation) {
  std::optional<Strike> strike;
  for (auto it = armed_.begin(); it != armed_.end();) {
    if (it->operation != operation || --it->left > 0) {
      ++it;
      continue;
    }
    const bool sticky = it->sticky || (strike && strike->sticky);
    strike = {"injected failure of call " + std::to_string(it->nth) + " of " + to_string(operation), sticky};
    it = armed_.erase(it);
  }
  return strike;
}

}  // namespace ebbtide::device
