// A device for tests: memory, streams, events and copies that misbehave exactly where a real accelerator would.
//
// Memory is readable only while a copy or kernel runs; new and freed memory is poisoned in stream order; freed
// addresses are handed out again at once. A queued copy runs at the latest moment that stream order allows, so what is
// not ordered is seen as wrong bytes; and every access is checked against those before it by vector clocks, so what is
// not ordered is found even where the bytes happen to be right.
//
// Thread safe. No function here knows Python or torch; torch_*.cc put PyTorch's interfaces on top.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ebbtide::device {

using DeviceIndex = int;
// Streams are numbered per device; 0 is the default stream and always there.
struct Stream {
  DeviceIndex device = 0;
  std::uint64_t number = 0;
  friend bool operator==(const Stream&, const Stream&) = default;
};
enum class EventId : std::uint64_t {};

enum class Mode {
  kLazy,  // a task runs when somebody must have it: a synchronize, a full queue, a kernel of its stream, or a task that
          // waits for it. `step` runs one more by hand. Asking an event whether it is done runs nothing.
  kWorker,  // one thread per stream, with `delay` before each copy
};
enum class Reuse {
  kAtOnce,   // the block freed last by the stream is the first it gets again
  kDelayed,  // as late as possible
};

struct Options {
  int devices = 1;
  std::uint64_t capacity_bytes = std::uint64_t{4} << 30;  // per device; address space only
  Mode mode = Mode::kLazy;
  Reuse reuse = Reuse::kAtOnce;
  bool poison = true;  // 0xFF on allocation and, in stream order, on free
  std::uint64_t queue_depth =
      0;                       // tasks per stream; a full queue blocks the caller (kWorker) or runs the oldest; 0: none
  std::uint64_t delay_us = 0;  // kWorker: before each copy
  // Virtual clock. Copies between host and device share one link per device and direction.
  double link_bytes_per_s = 55e9;
  double device_bytes_per_s = 3e12;  // copies within the device
  double copy_latency_s = 6e-6;
};

class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// A failure that was injected, or a device that was lost.
class DeviceFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class CopyKind { kH2D, kD2H, kD2D, kH2H };

struct CopyRecord {
  CopyKind kind{};
  std::uint64_t nbytes = 0;
  Stream stream;
  std::uint64_t dst = 0;  // addresses
  std::uint64_t src = 0;
  double begin_s = 0;  // on the virtual clock
  double end_s = 0;
};

// Two accesses to the same bytes, at least one of them a write, with no order between them.
struct Race {
  std::string first;  // "copy D2H on stream 0:2", "kernel aten::mul on stream 0:0", "free on stream 0:0", …
  std::string second;
  std::uint64_t begin = 0;  // addresses of the bytes that both touch
  std::uint64_t end = 0;
};

struct Access {
  const void* begin = nullptr;
  std::uint64_t nbytes = 0;
  bool write = false;
};

enum class Operation {
  kAllocate,
  kPin,
  kCopy,
  kRecord,
  kWait,
  kSynchronize,
  kRunCopy,  // a copy as it runs, after the call that queued it: always sticky, thrown by the next call
};

struct MemoryStats {
  std::uint64_t used_bytes = 0;     // in blocks handed out
  std::uint64_t peak_bytes = 0;     // since reset_peak
  std::uint64_t pending_bytes = 0;  // freed, yet in use by another stream
  std::uint64_t allocations = 0;
  std::uint64_t pinned_bytes = 0;
  std::uint64_t pin_allocations = 0;
};

class OpenBytes;

class Device {
 public:
  explicit Device(const Options& options = {});
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  // --- memory. Blocks start at multiples of 512 bytes and belong to the pool of the stream they were allocated on.
  // Throws OutOfMemory above the limit, after waiting for what freed blocks wait for. Null for no bytes.
  [[nodiscard]] void* allocate(std::uint64_t nbytes, Stream stream);
  // Never blocks. The block can be handed out to its stream at once; where `used_on` named other streams, once what was
  // queued on them by now is done.
  void free(void* block);
  // What is queued on `stream` by the time of `free`, or `unpin`, may still touch the block around the address.
  void used_on(void* address, Stream stream);
  [[nodiscard]] bool owns(const void* address) const;
  [[nodiscard]] DeviceIndex device_of(const void* address) const;
  void set_limit(DeviceIndex device, std::uint64_t nbytes);  // of used_bytes and pending_bytes
  [[nodiscard]] MemoryStats memory(DeviceIndex device) const;
  void reset_peak(DeviceIndex device);

  // Page-locked host memory, aligned to 4096 bytes; its accesses are checked like those of device memory. Null when an
  // injected failure says so.
  [[nodiscard]] void* pin(std::uint64_t nbytes);
  void unpin(void* block);
  [[nodiscard]] bool is_pinned(const void* address) const;

  // --- streams and events
  [[nodiscard]] Stream new_stream(DeviceIndex device);
  [[nodiscard]] int streams(DeviceIndex device) const;
  [[nodiscard]] EventId new_event();
  void destroy_event(EventId event);
  void record(EventId event, Stream stream);      // a new version each time
  void wait(Stream stream, EventId event);        // for the version recorded last; nothing when there is none
  [[nodiscard]] bool query(EventId event) const;  // of the version recorded last; runs nothing
  [[nodiscard]] bool query(Stream stream) const;
  void synchronize(EventId event);
  void synchronize(Stream stream);
  void synchronize(DeviceIndex device);

  // --- work
  // Queues a copy. Pageable host memory makes it run before the call returns, as drivers do. Memory is opened only
  // while bytes move.
  void copy(void* dst, const void* src, std::uint64_t nbytes, Stream stream);
  // Runs `work` now, after everything queued on the stream: kernels are not lazy. `accesses` are opened and checked.
  // `seconds` on the virtual clock. `work` may use the device, its own stream too, but what it allocates is poisoned
  // only after it: allocate what it writes before.
  void kernel(const std::string& name, Stream stream, const std::vector<Access>& accesses,
              const std::function<void()>& work, double seconds = 0);
  // Bytes read or written by the host itself: checked, and opened for device memory.
  void host_access(const std::string& name, const std::vector<Access>& accesses, const std::function<void()>& work);

  // --- by hand (kLazy)
  // Runs the oldest task of the stream and what it waits for; false when there is none. Poison is no task here.
  bool step(Stream stream);
  [[nodiscard]] std::uint64_t queued(Stream stream) const;

  // --- faults
  // The n-th call of `operation` from now on (1: the next) throws DeviceFailure, or OutOfMemory for kAllocate;
  // `sticky`: the device is lost with it.
  void fail(Operation operation, std::uint64_t nth, bool sticky = false);
  void clear_faults();
  // Everything but frees throws DeviceFailure from now on, until `recover`. What is queued is dropped and counts as
  // done.
  void lose();
  void recover();

  // --- what happened
  [[nodiscard]] std::vector<CopyRecord> copies() const;  // in the order they were queued
  void clear_copies();
  [[nodiscard]] std::vector<Race> races() const;
  void clear_races();
  // Off, races are found by their wrong bytes alone.
  void set_checking(bool happens_before);
  [[nodiscard]] double clock_s(Stream stream) const;

  void set_options(const Options& options);  // but for devices and capacity_bytes; everything queued is run first
  [[nodiscard]] const Options& options() const;

  // Opens memory for as long as it lives; pages stay open until the last one over them is gone.
  class Open {
   public:
    Open(Device& device, const std::vector<Access>& accesses);
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    ~Open();

   private:
    std::vector<std::unique_ptr<OpenBytes>> opened_;
  };

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "copy D2H on stream 0:2 and free on stream 0:0 touch [0x…, 0x…) without order"
std::string to_string(const Race& race);

}  // namespace ebbtide::device
