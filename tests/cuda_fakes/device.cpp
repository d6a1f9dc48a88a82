// A CUDA device that is not there: enough of one for torch to trace a backward on fake tensors of it.
#define CPU_CAPABILITY DEFAULT
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>);
} // namespace c10::impl

namespace at {
// The registry looks for this very name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

namespace at::native {
// What a GPU picks: flash for two-byte types without a mask, else the memory-efficient kernel.
int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
               const std::optional<Tensor>& mask, double, bool is_causal,
               std::optional<double>, bool) {
  const auto type = query.scalar_type();
  const bool half = type == kHalf || type == kBFloat16;
  const bool one_width = query.sym_size(-1) == value.sym_size(-1);
  const bool square = !is_causal || query.sym_size(-2) == key.sym_size(-2);
  if (half && !mask && one_width && square)
    return static_cast<int64_t>(SDPBackend::flash_attention);
  if (half || type == kFloat)
    return static_cast<int64_t>(SDPBackend::efficient_attention);
  return static_cast<int64_t>(SDPBackend::math);
}
static const bool chosen = [] {
  _fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  return true;
}();
} // namespace at::native
