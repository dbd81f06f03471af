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
  kGather,        // every probe before it was answered: call Engine::gather
  kRecord,        // record `event` on `stream`, for copies of `storage`; not needed any more after its kForget
  kCopy,          // start `copy`: run `plan` after all of `after` and `after_copies`; report with Engine::completed
  kWait,          // `stream` 0: block until `copy` is done and reported. Else: what is issued on `stream` from now on
                  // comes after `copy`; does not block
  kAlloc,         // allocate `nbytes` for `storage`, on `stream`: answer with Engine::allocated or allocation_failed
  kRecordStream,  // the memory is not reused before what is now queued on `stream` is done: of the storage that `copy`
                  // loaded, or of the saved `storage` where `copy` is 0; or, with `stream` 0, of the saved `storage`,
                  // for the stream that runs `copy`
  kReleaseLease,  // drop the reference that keeps the saved storage alive; one for each `lease` of a verdict, so that
                  // a lease granted to another thread meanwhile is not lost
  kReleaseRestored,  // drop the reference that keeps alive the restored storage that `copy` filled, no later one
  kGrow,             // add `nbytes` of memory to the space: answer with Engine::grown
  kLoadFailed,  // `copy`, a load, will not come: because `cause` failed, or (0) `nbytes` of host memory are missing
  kForget,      // drop everything about `storage`: its id is not used any more
  kTierFull,    // a storage stayed on the device because its tier is full or failed; sent once
};

// Where a copy leads. The space is the engine's first tier; the backing, where there is one, a file behind it.
enum class Hop : std::uint8_t { kOffload, kLoad, kSpill, kFetch };

struct Command {
  CommandKind kind{};
  StorageId storage{};
  CopyId copy{};
  Hop hop{};                             // kCopy
  std::vector<StorageId> storages = {};  // kCopy: whose bytes it moves, `storage` the first
  EventId event{};                       // kRecord
  StreamRef stream{};
  // kCopy: one event for each stream that wrote the bytes or may still use the memory they go to.
  std::vector<EventId> after = {};
  std::vector<CopyId> after_copies = {};  // kCopy: those that wrote what it reads
  CopyId cause{};                         // kLoadFailed
  std::uint64_t nbytes = 0;
  std::uint64_t residue = 0;  // kAlloc: address modulo kAlignmentBytes
  Plan plan = {};             // kCopy

  friend bool operator==(const Command&, const Command&) = default;
};

using Commands = std::vector<Command>;

std::string to_string(Hop hop);
std::string to_string(const Command& command);
std::string to_string(const Commands& commands);

}  // namespace ebbtide
