// Short words for the tests of the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine_driver.h"

namespace ebbtide::testing {

inline constexpr EngineConfig kUnbounded{.in_flight_bytes = UINT64_MAX};
inline constexpr ProbeAnswer kFree{};
inline constexpr ProbeAnswer kHeld{.holders = 1};
inline constexpr PassId kPass{1};
inline constexpr PassId kNextPass{2};

inline Storage filled(Driver& driver, std::uint64_t nbytes, std::uint8_t seed = 1) {
  Storage storage = driver.device.allocate(nbytes);
  write(storage, seed);
  return storage;
}

inline std::vector<CommandKind> kinds(const Commands& commands) {
  std::vector<CommandKind> result;
  for (const Command& command : commands) result.push_back(command.kind);
  return result;
}

inline const Command* find(const Commands& commands, CommandKind kind) {
  for (const Command& command : commands) {
    if (command.kind == kind) return &command;
  }
  return nullptr;
}

inline SaveRequest request(std::uint64_t identity, std::uint64_t nbytes, StreamRef stream = {}) {
  return {.storage = {DeviceId{0}, identity, 0x1000 * identity, nbytes},
          .view = bytes_view(0, nbytes),
          .epoch = EpochId{1},
          .stream = stream};
}

// `views` of one offloaded storage of 64 bytes.
std::vector<Saved> offloaded(Driver& driver, const std::vector<ViewMeta>& views, EpochId epoch = EpochId{1});
std::vector<Saved> offloaded_storages(Driver& driver, int count);
inline const std::vector<ViewMeta> kHalves = {bytes_view(0, 32), bytes_view(32, 64)};

// `count` storages of 64 bytes that nobody else holds, offloaded where there is room.
std::vector<Saved> pack_storages(Driver& driver, int count, EpochId epoch = EpochId{1});
// Backward over all of them in reverse, after which nothing is held.
void restore_and_drop(Driver& driver, const std::vector<Saved>& saved);

// An engine without a driver: each storage of 64 bytes is saved and offloaded.
struct Bare {
  explicit Bare(const EngineConfig& config = {}) : engine(config, std::make_shared<FakeSpace>(1 << 20)) {}

  TicketId offload(const ViewMeta& view = bytes_view(0, 64), StreamRef stream = {});
  // Answers for the load begun last of the storage; what it starts.
  Commands allocate(StorageId storage, CopyId load, std::uint64_t nbytes = 64, StreamRef stream = {});

  Engine engine;
  std::uint64_t saved = 0;
};

}  // namespace ebbtide::testing
