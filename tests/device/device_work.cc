#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>

#include "address.h"
#include "device.h"
#include "state.h"

namespace ebbtide::device {
namespace {

const char* to_string(CopyKind kind) {
  switch (kind) {
    case CopyKind::kH2D:
      return "H2D";
    case CopyKind::kD2H:
      return "D2H";
    case CopyKind::kD2D:
      return "D2D";
    case CopyKind::kH2H:
      return "H2H";
  }
  return "?";
}

CopyKind kind_of(bool to_device, bool from_device) {
  if (to_device) return from_device ? CopyKind::kD2D : CopyKind::kH2D;
  return from_device ? CopyKind::kD2H : CopyKind::kH2H;
}

}  // namespace

void Device::State::run(const Task& task) {
  const OpenBytes to(holder(task.dst), task.dst, task.nbytes);
  if (task.kind == Task::Kind::kPoison) {
    std::memset(pointer_to(task.dst), kPoison, task.nbytes);
    return;
  }
  {
    const Lock lock(scheduler.mutex);
    if (const auto strike = faults.count(Operation::kRunCopy)) throw DeviceFailure(strike->cause);
  }
  const OpenBytes from(holder(task.src), task.src, task.nbytes);
  std::memmove(pointer_to(task.dst), pointer_to(task.src), task.nbytes);
}

bool Device::State::checked(const char* where, const void* begin, std::uint64_t nbytes) {
  const std::uint64_t address = address_of(begin);
  const auto inside = [&](std::uint64_t block_begin, std::uint64_t block_bytes) {
    return address - block_begin <= block_bytes && nbytes <= block_bytes - (address - block_begin);
  };
  if (holder(address) != nullptr) {
    const Block* const block = block_at(address);
    if (block != nullptr && inside(block->extent.begin, block->nbytes)) return true;
    throw std::invalid_argument(std::string("[Device.") + where + "] " + std::to_string(nbytes) +
                                " bytes that are not all in one block in use");
  }
  const PinnedBlock* const block = pinned_at(address);
  if (block == nullptr) return false;
  if (inside(address_of(block->memory.get()), block->nbytes)) return true;
  throw std::invalid_argument(std::string("[Device.") + where + "] " + std::to_string(nbytes) +
                              " bytes that are not all in one pinned block");
}

std::vector<Access> Device::State::checked(const char* where, const std::vector<Access>& accesses) {
  std::vector<Access> result;
  for (const Access& access : accesses) {
    if (access.nbytes > 0 && checked(where, access.begin, access.nbytes)) result.push_back(access);
  }
  return result;
}

void Device::copy(void* dst, const void* src, std::uint64_t nbytes, Stream stream) {
  Lock lock(state_->scheduler.mutex);
  state_->begin_call("copy", Operation::kCopy);
  Lane& lane = state_->scheduler.lane(stream);
  if (nbytes == 0) return;
  state_->scheduler.wait_for_room(lock, lane);
  state_->fail_if_lost("copy");

  const CopyKind kind = kind_of(owns(dst), owns(src));
  std::vector<Access> accesses = state_->checked("copy", {{src, nbytes, false}, {dst, nbytes, true}});
  const bool pageable = accesses.size() < 2;
  state_->order.access(lane.actor, std::string("copy ") + to_string(kind) + " on stream " + device::to_string(stream),
                       accesses);
  const DeviceIndex link = kind == CopyKind::kH2D ? device_of(dst) : kind == CopyKind::kD2H ? device_of(src) : 0;
  const Span span = state_->clock.copy(state_->options, kind, link, nbytes, lane.time_s);
  lane.time_s = span.end_s;
  state_->copies.push_back({kind, nbytes, stream, address_of(dst), address_of(src), span.begin_s, span.end_s});
  const std::uint64_t seq = state_->scheduler.push(
      lane, {.kind = Task::Kind::kCopy, .dst = address_of(dst), .src = address_of(src), .nbytes = nbytes});
  if (!pageable) return;

  // Into pageable memory the call waits for the bytes; out of it they may be no further than a driver's own buffer.
  const VectorClock seen = state_->order.clock(lane.actor);
  state_->scheduler.finish(lock, lane, seq);
  state_->fail_if_lost("copy");
  if (kind != CopyKind::kH2D) state_->host_sees(seen, span.end_s);
}

void Device::kernel(const std::string& name, Stream stream, const std::vector<Access>& accesses,
                    const std::function<void()>& work, double seconds) {
  Lock lock(state_->scheduler.mutex);
  state_->fail_if_lost("kernel");
  Lane& lane = state_->scheduler.lane(stream);
  state_->order.access(lane.actor, "kernel " + name + " on stream " + device::to_string(stream),
                       state_->checked("kernel", accesses));
  lane.time_s = std::max(lane.time_s, state_->clock.host_s()) + seconds;
  const auto opened = [&] {
    const Open open(*this, accesses);
    work();
  };
  if (state_->scheduler.run_kernel(lock, lane, opened)) return;
  state_->fail_if_lost("kernel");
  throw DeviceFailure("[Device.kernel] dropped: the device was lost before its turn");
}

void Device::host_access(const std::string& name, const std::vector<Access>& accesses,
                         const std::function<void()>& work) {
  {
    const Lock lock(state_->scheduler.mutex);
    state_->order.access(kHost, name, state_->checked("host_access", accesses));
  }
  const Open open(*this, accesses);
  work();
}

Device::Open::Open(Device& device, const std::vector<Access>& accesses) {
  for (const Access& access : accesses) {
    const std::uint64_t begin = address_of(access.begin);
    opened_.push_back(std::make_unique<OpenBytes>(device.state_->holder(begin), begin, access.nbytes));
  }
}

Device::Open::~Open() = default;

}  // namespace ebbtide::device
