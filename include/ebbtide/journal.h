// Journal: what an engine was asked and what it answered, to be replayed against another engine.
//
// The engine decides from its calls alone, so a journal reproduces a run without a device, a framework or a clock.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ebbtide/engine.h"

namespace ebbtide {

namespace calls {

struct BeginEpoch {};
struct EndEpoch {
  EpochId epoch;
};
struct BeginGroup {
  EpochId epoch;
  std::size_t label;
};
struct EndGroup {};
struct Gather {};
struct Grown {
  bool ok;
};
struct Kept {
  KeepReason reason;
  std::uint64_t nbytes;
};
struct Drop {
  TicketId ticket;
};
struct Probed {
  StorageId storage;
  ProbeAnswer answer;
};
struct Completed {
  CopyId copy;
  bool ok;
  std::vector<ProbeAnswer> answers;
};
struct Allocated {
  StorageId storage;
  CopyId load;
  StorageRef restored;
  StreamRef stream;
};
struct AllocationFailed {
  StorageId storage;
  CopyId load;
};
struct Restore {
  TicketId ticket;
  PassId pass;
  bool live;
  bool shared;
  StreamRef stream;
};
struct EndPass {
  PassId pass;
};
struct OpenRun {
  std::size_t label;
};
struct Request {
  RunId run;
  std::uint64_t identity;
};
struct OffloadRun {
  RunId run;
};
struct LetGoRun {
  RunId run;
};
struct LoadRun {
  RunId run;
};
struct OrderAfterRun {
  RunId run;
  StreamRef stream;
};
struct ReleaseRun {
  RunId run;
};
struct KeepRun {
  RunId run;
};
struct CloseRun {
  RunId run;
};

}  // namespace calls

using Call = std::variant<calls::BeginEpoch, calls::EndEpoch, calls::BeginGroup, calls::EndGroup, calls::Gather,
                          calls::Grown, calls::Kept, SaveRequest, calls::Drop, calls::Probed, calls::Completed,
                          calls::Allocated, calls::AllocationFailed, calls::Restore, calls::EndPass, calls::OpenRun,
                          calls::Request, calls::OffloadRun, calls::LetGoRun, calls::LoadRun, calls::OrderAfterRun,
                          calls::ReleaseRun, calls::KeepRun, calls::CloseRun>;

struct JournalEntry {
  Call call;
  std::string answer;  // verdict and commands, or "error: …"
};

using Journal = std::vector<JournalEntry>;

struct Divergence {
  std::size_t index;
  std::string expected;
  std::string found;
};

// Makes the call on `engine` and returns its answer as text.
std::string answer(Engine& engine, const Call& call);

// Makes the journal's calls on a fresh engine with the same configuration and an equal space; returns the first call
// that is answered otherwise.
std::optional<Divergence> replay(const Journal& journal, Engine& engine);

std::string to_string(const SaveVerdict& verdict);
std::string to_string(const RestoreVerdict& verdict);

}  // namespace ebbtide
