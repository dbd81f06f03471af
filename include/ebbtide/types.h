// Value types shared by every layer. Everything here is copyable, comparable and owns nothing.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace ebbtide {

// Identities issued by the engine. They are never reused within one process, and 0 is never issued.
enum class StorageId : std::uint64_t {};
enum class TicketId : std::uint64_t {};
enum class CopyId : std::uint64_t {};
enum class EventId : std::uint64_t {};
// One entry of the context, and one backward over what it saved.
enum class EpochId : std::uint64_t {};
enum class PassId : std::uint64_t {};
// One run through a group of storages that are scheduled together, usually a layer; in the order of their beginning.
enum class GroupId : std::uint64_t {};
// One run through a group whose copies the caller starts.
enum class RunId : std::uint64_t {};

// Opaque numbers of the framework. 0 means "none": memory whose work is synchronous has no stream.
enum class DeviceId : std::int64_t {};
enum class StreamRef : std::uint64_t {};

template <class Id>
constexpr std::uint64_t value(Id id) {
  return static_cast<std::uint64_t>(id);
}

// Half-open range of bytes [begin, end) within one storage.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  [[nodiscard]] constexpr std::uint64_t nbytes() const { return end > begin ? end - begin : 0; }
  [[nodiscard]] constexpr bool empty() const { return end <= begin; }
  friend constexpr auto operator<=>(const ByteRange&, const ByteRange&) = default;
};

enum class Tier : std::uint8_t { kDevice, kHost, kFile, kStaging };

// Where bytes are: a device storage, a host block or a file extent, and a byte offset in it. `base` is the address of
// the storage or of the host slab; for a file it is 0 and `byte_offset` is the position in the file. Staging is memory
// beside the storages that only one copy uses: `base` is 0, and the executor provides it.
struct Place {
  Tier tier = Tier::kDevice;
  std::uint64_t base = 0;
  std::uint64_t byte_offset = 0;

  [[nodiscard]] constexpr std::uint64_t position() const { return base + byte_offset; }
  [[nodiscard]] constexpr Place advanced(std::uint64_t nbytes) const { return {tier, base, byte_offset + nbytes}; }
  friend constexpr auto operator<=>(const Place&, const Place&) = default;
};

std::string to_string(Tier tier);
std::string to_string(const ByteRange& range);
std::string to_string(const Place& place);

}  // namespace ebbtide
