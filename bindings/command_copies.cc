// Events, copies on streams, and waiting for them.
#include <exception>
#include <utility>
#include <vector>

#include "bindings.h"
#include "command_runner.h"
#include "commands.h"
#include "runner_parts.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

void CommandRunner::record(const Command& command) { copies_->record(command.storage, command.event, command.stream); }

void CommandRunner::copy(const Command& command) {
  const bool loads = command.hop == Hop::kLoad;
  if (copies_ == nullptr || (!loads && command.hop != Hop::kOffload)) {
    self().attr("copy_by_threads")(command);
    return;
  }
  std::vector<nb::object> entries;
  for (const StorageId storage : command.storages) {
    nb::object entry = find(storage);
    if (!entry.is_valid()) {  // saving it was cut short
      run(engine_.completed(command.copy, false, std::vector<ProbeAnswer>(command.storages.size(), kUnknown)));
      return;
    }
    entries.push_back(std::move(entry));
  }
  std::exception_ptr failure;
  try {
    const nb::int_ key(value(command.copy));
    DeviceStorages storages;
    for (const nb::object& entry : entries) {
      nb::object storage = loads ? get(entry, names().restored)[key] : last_of(get(entry, names().leases));
      if (!storage.is_valid()) throw nb::key_error("a storage to copy was let go of");
      const auto address = nb::cast<std::uint64_t>(address_(storage));
      storages.emplace_back(address, std::move(storage));
    }
    const nb::object ref = get(entries.front(), names().ref);
    copies_->submit(command, storages, nb::cast<std::int64_t>(item(ref, 0)));
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure) {
    if (!loads) return;
    const nb::int_ number(value(command.copy));
    for (const nb::object& entry : entries) set(entry, names().load_started, number);
    return;
  }
  // Interrupted after it was queued, it is reported as any other.
  if (!copies_->started(command.copy)) {
    complete({command.copy, command.hop, command.storages, to_python(failure)});
  }
  if (!loads || !is_ordinary(failure)) std::rethrow_exception(failure);
}

void CommandRunner::wait(const Command& command) {
  if (value(command.stream) == 0 || !copies_->started(command.copy)) self().attr("wait_for")(command);
  if (value(command.stream) != 0) copies_->order(command.copy, command.stream);
}

}  // namespace ebbtide::bindings
