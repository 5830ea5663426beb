// FlashInfer's norms (flashinfer/norm.cuh) for rows of fp16 and bf16, without its Python package. Compiled with -DLIBRARY=NAME.
#include <flashinfer/norm.cuh>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

using torch::stable::Tensor;

namespace {

cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Call with a value of the CUDA type of x's elements.
template <typename Function>
void of_dtype(const Tensor& x, Function function) {
  using torch::headeronly::ScalarType;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  cudaError_t status = cudaErrorInvalidValue;
  if (x.scalar_type() == ScalarType::Half) status = function(half{});
  if (x.scalar_type() == ScalarType::BFloat16) status = function(nv_bfloat16{});
  STD_TORCH_CHECK(status == cudaSuccess, "FlashInfer: ", cudaGetErrorString(status));
}

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  of_dtype(input, [&](auto zero) {
    using T = decltype(zero);
    return flashinfer::norm::RMSNorm<T>(
        static_cast<T*>(input.data_ptr()), static_cast<T*>(weight.data_ptr()), static_cast<T*>(out.data_ptr()),
        input.size(0), input.size(1), input.stride(0), out.stride(0), epsilon, false, stream_of(input));
  });
}

void fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight, double epsilon) {
  of_dtype(input, [&](auto zero) {
    using T = decltype(zero);
    return flashinfer::norm::FusedAddRMSNorm<T>(
        static_cast<T*>(input.data_ptr()), static_cast<T*>(residual.data_ptr()), static_cast<T*>(weight.data_ptr()),
        input.size(0), input.size(1), input.stride(0), residual.stride(0), epsilon, false, stream_of(input));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(LIBRARY, library) {
  library.def("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()");
  library.def("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LIBRARY, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
}
