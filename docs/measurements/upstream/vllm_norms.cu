// vLLM's norms under names of this library. Compiled with -DLAYERNORM='"csrc/…/layernorm_kernels.cu"', -DLIBRARY=NAME,
// and -DWEIGHT='"Tensor"' or '"Tensor?"', as that version declares it.
#include LAYERNORM

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(LIBRARY, library) {
  library.def("rms_norm(Tensor! out, Tensor input, " WEIGHT " weight, float epsilon) -> ()");
  library.def("fused_add_rms_norm(Tensor! input, Tensor! residual, " WEIGHT " weight, float epsilon) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(LIBRARY, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
}
