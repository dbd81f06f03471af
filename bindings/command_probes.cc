// Who else holds a storage, and what became of copies.
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings.h"
#include "command_runner.h"
#include "commands.h"
#include "finally.h"
#include "runner_parts.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

// How many of the in-place counters moved since the saves.
std::uint64_t CommandRunner::moved(const StorageEntry& entry) const {
  std::uint64_t moved = 0;
  for (std::size_t i = 0; i < entry.witnesses.size(); ++i) {  // another thread may add one meanwhile
    const auto [witness, version] = entry.witnesses[i];
    if (nb::cast<std::uint64_t>(version_(witness)) != version) ++moved;
  }
  return moved;
}

bool CommandRunner::intact(const StorageEntry& entry) const { return moved(entry) == 0; }

ProbeAnswer CommandRunner::inspect(const StorageEntry& entry) const {
  ProbeAnswer answer;
  {
    const nb::object lease = entry.lease();
    if (!lease.is_valid()) return kHeld;  // released
    answer.same = nb::cast<bool>(unmoved_(lease, entry.ref));
  }
  const std::uint64_t changed = moved(entry);
  answer.intact = changed == 0;
  answer.spoiled = changed > 0 && changed == entry.witnesses.size();
  // The list of leases is to be a lease's only holder here.
  try {
    const nb::object holders = holders_(entry.leases);
    answer.counted = !holders.is_none();
    answer.holders = answer.counted ? nb::cast<std::uint64_t>(holders) : 0;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_IndexError)) throw;
    return kHeld;
  }
  return answer;
}

void CommandRunner::probe(const Command& command) {
  ProbeAnswer answer = kUnknown;
  finally(
      [&] {
        const EntryRef entry = find(command.storage);
        answer = entry ? inspect(*entry) : kHeld;
      },
      [&] { run(engine_.probed(command.storage, answer)); });
}

void CommandRunner::settle() {
  if (copies_ == nullptr) return;
  while (const std::optional<Completion> done = copies_->pop()) complete(*done);
}

void CommandRunner::complete(const Completion& done) {
  std::vector<ProbeAnswer> answers;
  const bool ok = done.error.is_none();
  finally(
      [&] {
        if (!ok)
          self().attr("note_error")(value(done.copy), static_cast<int>(done.hop), numbers(done.storages), done.error);
        if (done.hop != Hop::kOffload) return;
        for (const StorageId storage : done.storages) {
          const EntryRef entry = find(storage);
          answers.push_back(entry ? inspect(*entry) : kUnknown);
        }
      },
      [&] {
        const Commands commands = engine_.completed(done.copy, ok, answers);
        expected_.erase(done.copy);
        run(commands);
      });
}

}  // namespace ebbtide::bindings
