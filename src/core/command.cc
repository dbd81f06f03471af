#include "ebbtide/command.h"

namespace ebbtide {

namespace {

std::string number(std::uint64_t n) { return std::to_string(n); }

std::string after(const Command& command) {
  std::string text;
  for (const EventId event : command.after)
    text += (text.empty() ? " after event " : ", event ") + number(value(event));
  for (const CopyId copy : command.after_copies)
    text += (text.empty() ? " after copy " : ", copy ") + number(value(copy));
  return text;
}

std::string on(const Command& command) {
  return value(command.stream) == 0 ? "" : " on stream " + number(value(command.stream));
}

}  // namespace

std::string to_string(Hop hop) {
  static constexpr const char* kNames[] = {"offload", "load", "spill", "fetch"};
  return kNames[static_cast<std::size_t>(hop)];
}

std::string to_string(const Command& command) {
  const std::string storage = "storage " + number(value(command.storage));
  const std::string copy = "copy " + number(value(command.copy));
  switch (command.kind) {
    case CommandKind::kProbe:
      return "probe " + storage;
    case CommandKind::kGather:
      return "gather";
    case CommandKind::kRecord:
      return "record event " + number(value(command.event)) + on(command);
    case CommandKind::kCopy: {
      std::string of;
      for (const StorageId id : command.storages) of += (of.empty() ? " of storage " : ", ") + number(value(id));
      return to_string(command.hop) + " " + copy + of + after(command) + "\n" + to_string(command.plan);
    }
    case CommandKind::kWait:
      return "wait " + copy + on(command);
    case CommandKind::kAlloc:
      return "alloc " + number(command.nbytes) + " bytes at " + number(command.residue) + " for " + storage + ", " +
             copy + on(command);
    case CommandKind::kRecordStream:
      return "record stream for " + storage + " of " + copy + on(command);
    case CommandKind::kReleaseLease:
      return "release lease of " + storage;
    case CommandKind::kReleaseRestored:
      return "release restored " + storage + " of " + copy;
    case CommandKind::kGrow:
      return "grow by " + number(command.nbytes) + " bytes";
    case CommandKind::kLoadFailed:
      return copy + " for " + storage + " will not come: " +
             (value(command.cause) != 0 ? "copy " + number(value(command.cause)) + " failed"
                                        : number(command.nbytes) + " bytes are missing");
    case CommandKind::kForget:
      return "forget " + storage;
    case CommandKind::kTierFull:
      return "tier full at " + storage;
  }
  return "?";
}

std::string to_string(const Commands& commands) {
  std::string text;
  for (const Command& command : commands) {
    text += to_string(command);
    if (text.back() != '\n') text += '\n';
  }
  return text;
}

}  // namespace ebbtide
