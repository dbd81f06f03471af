#include "engine_test_support.h"

#include <gtest/gtest.h>

namespace ebbtide::testing {

std::vector<Saved> offloaded(Driver& driver, const std::vector<ViewMeta>& views, EpochId epoch) {
  Storage storage = filled(driver, 64);
  std::vector<Saved> saved;
  for (const ViewMeta& view : views) {
    saved.push_back(&view == &views.back() ? driver.pack(std::move(storage), view, epoch)
                                           : driver.pack(storage, view, epoch));
  }
  driver.end_epoch(EpochId{});
  driver.complete_all();
  return saved;
}

std::vector<Saved> offloaded_storages(Driver& driver, int count) {
  std::vector<Saved> saved;
  for (int i = 0; i < count; ++i) saved.push_back(offloaded(driver, {bytes_view(0, 64)}).front());
  return saved;
}

TicketId Bare::offload(const ViewMeta& view, StreamRef stream) {
  const std::uint64_t n = ++saved;
  const SaveVerdict verdict =
      engine.save({.storage = {DeviceId{0}, n, 0x1000 * n, 64}, .view = view, .epoch = EpochId{1}, .stream = stream});
  for (const Command& command : engine.probed(verdict.storage, kFree)) {
    if (command.kind == CommandKind::kCopy) (void)engine.completed(command.copy, true, {kFree});
  }
  return verdict.ticket;
}

Commands Bare::allocate(StorageId storage, CopyId load, std::uint64_t nbytes, StreamRef stream) {
  const std::uint64_t n = value(storage);
  return engine.allocated(storage, load, {DeviceId{0}, 100 + n, 0x100000 * n, nbytes}, stream);
}

std::vector<Saved> pack_storages(Driver& driver, int count, EpochId epoch) {
  std::vector<Saved> saved;
  for (int i = 0; i < count; ++i) {
    saved.push_back(driver.pack(filled(driver, 64, static_cast<std::uint8_t>(11 * i)), bytes_view(0, 64), epoch));
  }
  return saved;
}

void restore_and_drop(Driver& driver, const std::vector<Saved>& saved) {
  for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
    EXPECT_NE(driver.unpack(*one, kPass), nullptr);
    driver.drop(*one);
  }
  driver.end_pass(kPass);
  driver.complete_all();
  driver.expect_at_rest();
}

}  // namespace ebbtide::testing
