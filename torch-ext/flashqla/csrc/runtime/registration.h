// Registers one op with PyTorch's dispatcher when the library is loaded; every op file has one static object of this.
#pragma once

#include "torch_shim.h"

namespace flashqla {

class OpRegistration {
 public:
  // `schema` as in torch.library.Library.define; `name` repeats the part before the parenthesis. The op is registered
  // for CUDA tensors in the namespace OPS_NS that the library is compiled with.
  OpRegistration(const char* schema, const char* name, BoxedFunction function);
};

}  // namespace flashqla
