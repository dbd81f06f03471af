// Initialisation, pinned memory, storage resizing and generators: what PyTorch asks its accelerator for by name.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <vector>

#include "torch_alias.h"
#include "torch_shell.h"

namespace ebbtide::device {
namespace {

// Random numbers come from a CPU generator, so that the same seed gives the CPU's bits.
class TideGenerator final : public c10::GeneratorImpl {
 public:
  TideGenerator(c10::DeviceIndex index, at::Generator cpu)
      : GeneratorImpl(c10::Device(kTide, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(std::uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { cpu_.set_offset(offset); }
  std::uint64_t get_offset() const override { return cpu_.get_offset(); }
  std::uint64_t current_seed() const override { return cpu_.current_seed(); }
  std::uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }

 private:
  TideGenerator* clone_impl() const override { return new TideGenerator(device().index(), cpu_.clone()); }

  at::Generator cpu_;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  Hooks() {
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
      defaults_.push_back(at::make_generator<TideGenerator>(index, at::detail::getDefaultCPUGenerator()));
    }
  }

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_index(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return set_current_index(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_index() : set_current_index(index);
  }

  at::Device getDeviceFromPtr(void* data) const override {
    return {kTide, static_cast<c10::DeviceIndex>(the_device().device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return the_device().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    c10::DataPtr data = device_allocator().allocate(nbytes);
    const std::size_t kept = std::min(nbytes, impl->nbytes());
    if (kept != 0) the_device().copy(data.get(), impl->data(), kept, current_stream(storage.device().index()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return defaults_.at(static_cast<std::size_t>(index < 0 ? current_index() : index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<TideGenerator>(index < 0 ? current_index() : index, at::detail::createCPUGenerator());
  }

 private:
  std::vector<at::Generator> defaults_;
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator cpu_generator(const at::Generator& generator) {
  const auto* mine = dynamic_cast<TideGenerator*>(generator.unsafeGetGeneratorImpl());
  return mine == nullptr ? generator : mine->cpu();
}

}  // namespace ebbtide::device
