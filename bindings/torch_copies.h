// What is asked of PyTorch's streams for every copy. Nothing here is linked to it: the module comes from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <utility>

#include "native_calls.h"

namespace ebbtide::bindings {

// The methods of ebbtide.framework.Streams that are called for every copy: the base class of
// ebbtide.torch.streams.TorchStreams, which has what is asked rarely. `streams` is its list, by number; `helpers` has
// torch's functions for the current stream and device. Thread safe as that is.
class TorchCopies {
 public:
  TorchCopies(const nanobind::object& torch, nanobind::list streams, const nanobind::object& helpers);
  TorchCopies(const TorchCopies&) = delete;
  TorchCopies& operator=(const TorchCopies&) = delete;

  [[nodiscard]] std::uint64_t current(std::int64_t device);
  [[nodiscard]] nanobind::object record(std::size_t stream, nanobind::object event) const;
  void wait(std::size_t stream, nanobind::handle event) const;
  [[nodiscard]] nanobind::object bytes_of(nanobind::handle storage);
  [[nodiscard]] nanobind::object part_of(nanobind::handle memory, std::uint64_t byte_offset,
                                         std::uint64_t nbytes) const;
  [[nodiscard]] nanobind::object issue(std::size_t stream, nanobind::handle after, nanobind::handle copies,
                                       nanobind::object event);
  void record_stream(nanobind::handle storage, std::size_t number);
  void record_stream_of(nanobind::handle tensor, std::size_t number);

 private:
  [[nodiscard]] nanobind::object self() const { return nanobind::find(this); }
  [[nodiscard]] nanobind::object stream(std::size_t number) const;

  const nanobind::list streams_;
  const nanobind::object event_type_;
  const Attribute stream_id_, stream_device_, stream_device_index_, storage_device_, device_index_;
  const Function record_event_, wait_event_, copy_, detach_, set_, is_conj_, is_neg_, record_stream_;
  const Function current_stream_, set_stream_, current_device_, modes_entered_, disable_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::uint64_t> numbers_;  // by device and torch's number, seen so far
  std::map<std::int64_t, nanobind::object> empty_;                          // bytes, by device
};

}  // namespace ebbtide::bindings
