#include "registration.h"

#ifndef OPS_NS
#error "OPS_NS, the op namespace of this build, is not defined"
#endif

namespace flashqla {

// An exception must not leave a constructor of a library that is being loaded: the process would end. The first two
// calls fail for no reason that a user can have; a failing definition means that the op is there already. Namespaces
// end in a digest of everything that the library is made from, so it is there from a second copy of this same library,
// and the first copy stays in charge.
OpRegistration::OpRegistration(const char* schema, const char* name, BoxedFunction function) {
  TorchLibraryHandle definitions = nullptr, implementations = nullptr;  // never deleted: the ops live with the process
  if (aoti_torch_library_init_fragment(OPS_NS, "flashqla", __LINE__, &definitions) != 0) return;
  if (aoti_torch_library_def(definitions, schema) != 0) return;
  if (aoti_torch_library_init_impl(OPS_NS, "CUDA", "flashqla", __LINE__, &implementations) != 0) return;
  aoti_torch_library_impl(implementations, name, function);
}

}  // namespace flashqla
