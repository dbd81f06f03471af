#include "torch_copies.h"

#include "bindings.h"
#include "finally.h"
#include "torch_tensors.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

TorchCopies::TorchCopies(const nb::object& torch, nb::list streams, const nb::object& helpers)
    : streams_(std::move(streams)),
      event_type_(torch.attr("Event")),
      stream_id_(torch.attr("Stream"), "stream_id"),
      stream_device_(torch.attr("Stream"), "device"),
      stream_device_index_(torch.attr("Stream"), "device_index"),
      storage_device_(torch.attr("UntypedStorage"), "device"),
      device_index_(torch.attr("device"), "index"),
      record_event_(event_type_, "record"),
      wait_event_(torch.attr("Stream"), "wait_event"),
      copy_(torch.attr("Tensor"), "copy_"),
      detach_(torch.attr("Tensor"), "detach"),
      set_(torch.attr("Tensor"), "set_"),
      is_conj_(torch.attr("Tensor"), "is_conj"),
      is_neg_(torch.attr("Tensor"), "is_neg"),
      record_stream_(torch.attr("Tensor"), "record_stream"),
      current_stream_(helpers, "current_stream"),
      set_stream_(helpers, "set_stream"),
      current_device_(helpers, "current_device"),
      modes_entered_(torch.attr("_C"), "_len_torch_dispatch_stack"),
      disable_(torch.attr("_C"), "_DisableTorchDispatch") {}

nb::object TorchCopies::stream(std::size_t number) const { return streams_[number]; }

std::uint64_t TorchCopies::current(std::int64_t device) {
  const nb::object stream = current_stream_(nb::int_(device));
  const std::pair key(device, signed_of(stream_id_.get(stream)));
  const auto found = numbers_.find(key);
  if (found != numbers_.end()) return found->second;
  return numbers_[key] = unsigned_of(self().attr("number_of")(stream));
}

nb::object TorchCopies::record(std::size_t number, nb::object event) const {
  const nb::object on = stream(number);
  if (event.is_none()) event = event_type_(stream_device_.get(on));
  record_event_(event, on);
  return event;
}

void TorchCopies::wait(std::size_t number, nb::handle event) const { wait_event_(stream(number), event); }

nb::object TorchCopies::bytes_of(nb::handle storage) {
  const Unobserved unobserved(modes_entered_, disable_);
  const nb::object device = storage_device_.get(storage);
  const std::int64_t index = signed_of(device_index_.get(device));
  auto found = empty_.find(index);
  if (found == empty_.end()) found = empty_.try_emplace(index, self().attr("no_bytes")(device)).first;
  return set_(detach_(found->second), storage);  // cheaper than a new tensor
}

nb::object TorchCopies::part_of(nb::handle memory, std::uint64_t byte_offset, std::uint64_t nbytes) const {
  const Unobserved unobserved(modes_entered_, disable_);
  const auto begin = static_cast<Py_ssize_t>(byte_offset);
  PyObject* const part = PySequence_GetSlice(memory.ptr(), begin, begin + static_cast<Py_ssize_t>(nbytes));
  return nb::steal(nb::detail::raise_if_null(part));
}

nb::object TorchCopies::issue(std::size_t number, nb::handle after, nb::handle copies, nb::object event) {
  const Unobserved unobserved(modes_entered_, disable_);
  const nb::object on = stream(number);
  for (const nb::handle before : after) wait_event_(on, before);
  const auto copy = [&] {
    for (const nb::handle pair : copies) {
      copy_(nb::handle(PyTuple_GET_ITEM(pair.ptr(), 0)), nb::handle(PyTuple_GET_ITEM(pair.ptr(), 1)),
            nb::handle(Py_True));
    }
  };
  const nb::object index = stream_device_index_.get(on);
  if (index.equal(current_device_())) {
    const nb::object current = current_stream_(index);
    finally(
        [&] {
          set_stream_(on);
          copy();
        },
        [&] { set_stream_(current); });
  } else {
    const nb::object context = self().attr("on")(number);
    context.attr("__enter__")();
    finally(copy, [&] { context.attr("__exit__")(nb::none(), nb::none(), nb::none()); });
  }
  if (event.is_none()) event = event_type_(stream_device_.get(on));
  record_event_(event, on);
  return event;
}

void TorchCopies::record_stream(nb::handle storage, std::size_t number) {
  const Unobserved unobserved(modes_entered_, disable_);
  record_stream_(bytes_of(storage), stream(number));
}

void TorchCopies::record_stream_of(nb::handle tensor, std::size_t number) {
  const Unobserved unobserved(modes_entered_, disable_);
  if (is_true(is_conj_(tensor)) || is_true(is_neg_(tensor))) {
    // Torch would carry the bits out first, and tell the allocator of the tensor that it makes for that.
    record_stream(tensor.attr("untyped_storage")(), number);
  } else {
    record_stream_(tensor, stream(number));
  }
}

void bind_torch_copies(nb::module_& m) {
  nb::class_<TorchCopies>(m, "TorchCopies")
      .def(nb::init<const nb::object&, nb::list, const nb::object&>(), nb::arg("torch"), nb::arg("streams"),
           nb::arg("helpers"),
           nb::sig("def __init__(self, torch: object, streams: list[typing.Any], helpers: object) -> None"))
      .def("current", &TorchCopies::current, nb::arg("device"))
      .def("record", &TorchCopies::record, nb::arg("stream"), nb::arg("event") = nb::none(),
           nb::sig("def record(self, stream: int, event: typing.Any = None) -> typing.Any"))
      .def("wait", &TorchCopies::wait, nb::arg("stream"), nb::arg("event"),
           nb::sig("def wait(self, stream: int, event: typing.Any) -> None"))
      .def("bytes_of", &TorchCopies::bytes_of, nb::arg("storage"),
           nb::sig("def bytes_of(self, storage: typing.Any) -> typing.Any"))
      .def("part_of", &TorchCopies::part_of, nb::arg("memory"), nb::arg("byte_offset"), nb::arg("nbytes"),
           nb::sig("def part_of(self, memory: typing.Any, byte_offset: int, nbytes: int) -> typing.Any"))
      .def("issue", &TorchCopies::issue, nb::arg("stream"), nb::arg("after"), nb::arg("copies"),
           nb::arg("event") = nb::none(),
           nb::sig("def issue(self, stream: int, after: typing.Any, copies: typing.Any, event: typing.Any = None) "
                   "-> typing.Any"))
      .def("record_stream", &TorchCopies::record_stream, nb::arg("storage"), nb::arg("stream"),
           nb::sig("def record_stream(self, storage: typing.Any, stream: int) -> None"))
      .def("record_stream_of", &TorchCopies::record_stream_of, nb::arg("tensor"), nb::arg("stream"),
           nb::sig("def record_stream_of(self, tensor: typing.Any, stream: int) -> None"));
}

}  // namespace ebbtide::bindings
