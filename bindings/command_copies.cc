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
  std::vector<EntryRef> entries;
  for (const StorageId storage : command.storages) {
    EntryRef entry = find(storage);
    if (!entry) {  // saving it was cut short
      run(engine_.completed(command.copy, false, std::vector<ProbeAnswer>(command.storages.size(), kUnknown)));
      return;
    }
    entries.push_back(std::move(entry));
  }
  std::exception_ptr failure;
  try {
    DeviceStorages storages;
    for (const EntryRef& entry : entries) {
      nb::object storage = loads ? entry->restored_by(command.copy) : entry->lease();
      if (!storage.is_valid()) throw nb::key_error("a storage to copy was let go of");
      const auto address = nb::cast<std::uint64_t>(address_(storage));
      storages.emplace_back(address, std::move(storage));
    }
    copies_->submit(command, storages, entries.front()->device);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure) {
    if (!loads) return;
    for (const EntryRef& entry : entries) entry->load_started = command.copy;
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

void CommandRunner::record_stream(const Command& command) {
  const EntryRef entry = find(command.storage);
  if (!entry) return;
  nb::object storage = entry->lease();
  StreamRef stream = command.stream;
  if (value(stream) == 0) {
    // For the copy that reads it.
    if (!copies_->started(command.copy)) self().attr("await_start")(value(command.copy));
    stream = copies_->stream_of(command.copy);
  } else if (value(command.copy) == 0) {
    if (!storage.is_valid()) storage = lock_(entry->weak);
  } else {
    storage = entry->restored_by(command.copy);
    if (!storage.is_valid() && !entry->restored_weak.is_none()) storage = lock_(entry->restored_weak);
  }
  if (!storage.is_valid() || storage.is_none() || value(stream) == 0) return;
  const std::uint64_t number = value(stream);
  try {
    streams_.attr("record_stream")(storage, number);
  } catch (...) {
    // It may be let go of next: then nothing may be queued that uses it.
    streams_.attr("synchronize")(streams_.attr("record")(number));
    throw;
  }
}

}  // namespace ebbtide::bindings
