// Commands: what the engine asks of the session. The order of a list is the order of execution.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebbtide/plan.h"
#include "ebbtide/types.h"

namespace ebbtide {

enum class CommandKind : std::uint8_t {
  kProbe,         // who else holds `storage`, is its content as saved: answer with Engine::probed
  kRecord,        // record `event` on `stream`, for copies of `storage`; not needed any more after its kForget
  kCopy,          // start `copy`: run `plan` after all events of `after`; report with Engine::completed
  kWait,          // block until `copy` is done and reported
  kAlloc,         // allocate `nbytes` for `storage`: answer with Engine::allocated or allocation_failed
  kReleaseLease,  // drop the reference that keeps the saved storage alive; one for each `lease` of a verdict, so that
                  // a lease granted to another thread meanwhile is not lost
  kReleaseRestored,  // drop the reference that keeps alive the restored storage that `copy` filled, no later one
  kForget,           // drop everything about `storage`: its id is not used any more
  kTierFull,         // a storage stayed on the device because its tier is full or failed; sent once
};

struct Command {
  CommandKind kind{};
  StorageId storage{};
  CopyId copy{};
  bool to_device = false;  // direction of a copy
  EventId event{};         // kRecord
  StreamRef stream{};      // kRecord
  // kCopy: one event for each stream that wrote the bytes or may still use the memory they go to.
  std::vector<EventId> after = {};
  std::uint64_t nbytes = 0;   // kAlloc
  std::uint64_t residue = 0;  // kAlloc: address modulo kAlignmentBytes
  Plan plan = {};             // kCopy

  friend bool operator==(const Command&, const Command&) = default;
};

using Commands = std::vector<Command>;

std::string to_string(const Command& command);
std::string to_string(const Commands& commands);

}  // namespace ebbtide
