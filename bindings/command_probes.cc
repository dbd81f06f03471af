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
std::uint64_t CommandRunner::moved(nb::handle witnesses) const {
  std::uint64_t moved = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(witnesses.ptr()); ++i) {
    const nb::object witness = nb::borrow(PyList_GET_ITEM(witnesses.ptr(), i));
    if (!version_(item(witness, 0)).equal(item(witness, 1))) ++moved;
  }
  return moved;
}

bool CommandRunner::intact(nb::handle entry) const { return moved(get(entry, names().witnesses)) == 0; }

ProbeAnswer CommandRunner::inspect(nb::handle entry) const {
  const nb::object leases = get(entry, names().leases);
  ProbeAnswer answer;
  {
    const nb::object lease = last_of(leases);
    if (!lease.is_valid()) return kHeld;  // released
    answer.same = nb::cast<bool>(unmoved_(lease, get(entry, names().ref)));
  }
  const nb::object witnesses = get(entry, names().witnesses);
  const std::uint64_t changed = moved(witnesses);
  answer.intact = changed == 0;
  answer.spoiled = changed > 0 && changed == static_cast<std::uint64_t>(PyList_GET_SIZE(witnesses.ptr()));
  // The list of leases is to be a lease's only holder here.
  try {
    const nb::object holders = holders_(leases);
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
        const nb::object entry = find(command.storage);
        answer = entry.is_valid() ? inspect(entry) : kHeld;
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
          const nb::object entry = find(storage);
          answers.push_back(entry.is_valid() ? inspect(entry) : kUnknown);
        }
      },
      [&] {
        const Commands commands = engine_.completed(done.copy, ok, answers);
        expected_.erase(done.copy);
        run(commands);
      });
}

}  // namespace ebbtide::bindings
