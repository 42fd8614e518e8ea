// What torch asks a CUDA build for: a device guard and the device's hooks, so that tensors of cuda:0 can be made, moved and differentiated.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;
const c10::Device DEVICE(CUDA, 0);

c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}
