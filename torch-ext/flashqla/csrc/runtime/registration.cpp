#include "registration.h"

#include "errors.h"

#ifndef OPS_NS
#error "OPS_NS, the op namespace of this build, is not defined"
#endif

namespace flashqla {

OpRegistration::OpRegistration(const char* schema, const char* name, BoxedFunction function) {
  TorchLibraryHandle definitions = nullptr, implementations = nullptr;  // never deleted: the ops live with the process
  FLASHQLA_TORCH(aoti_torch_library_init_fragment(OPS_NS, "flashqla", __LINE__, &definitions));
  FLASHQLA_CHECK(
      aoti_torch_library_def(definitions, schema) == 0,
      "%s::%s cannot be registered, most likely because another copy of this library is loaded already; load it "
      "once per process.",
      OPS_NS, name);
  FLASHQLA_TORCH(aoti_torch_library_init_impl(OPS_NS, "CUDA", "flashqla", __LINE__, &implementations));
  FLASHQLA_TORCH(aoti_torch_library_impl(implementations, name, function));
}

}  // namespace flashqla
