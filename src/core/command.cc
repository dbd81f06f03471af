#include "ebbtide/command.h"

namespace ebbtide {

namespace {

std::string number(std::uint64_t n) { return std::to_string(n); }

std::string after(const Command& command) {
  std::string text;
  for (const EventId event : command.after) text += (text.empty() ? " after event " : ", ") + number(value(event));
  return text;
}

}  // namespace

std::string to_string(const Command& command) {
  const std::string storage = "storage " + number(value(command.storage));
  const std::string copy = "copy " + number(value(command.copy));
  switch (command.kind) {
    case CommandKind::kProbe:
      return "probe " + storage;
    case CommandKind::kRecord:
      return "record event " + number(value(command.event)) + " on stream " + number(value(command.stream));
    case CommandKind::kCopy:
      return std::string(command.to_device ? "h2d " : "d2h ") + copy + " of " + storage + after(command) + "\n" +
             to_string(command.plan);
    case CommandKind::kWait:
      return "wait " + copy;
    case CommandKind::kAlloc:
      return "alloc " + number(command.nbytes) + " bytes at " + number(command.residue) + " for " + storage;
    case CommandKind::kReleaseLease:
      return "release lease of " + storage;
    case CommandKind::kReleaseRestored:
      return "release restored " + storage + " of " + copy;
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
