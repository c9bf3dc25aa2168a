"""The functions of libtorch that the library calls, each with the PyTorch release that put it into the stable C interface.

The build fails when the library imports one that is not listed here, or one newer than OLDEST_TORCH.
"""

OLDEST_TORCH = (2, 9)

SINCE = {
    "aoti_torch_check": (2, 9),
    "aoti_torch_copy_": (2, 9),
    "aoti_torch_create_device_guard": (2, 9),
    "aoti_torch_delete_device_guard": (2, 9),
    "aoti_torch_delete_tensor_object": (2, 9),
    "aoti_torch_device_type_cpu": (2, 9),
    "aoti_torch_device_type_cuda": (2, 9),
    "aoti_torch_dtype_bfloat16": (2, 9),
    "aoti_torch_dtype_float16": (2, 9),
    "aoti_torch_dtype_float32": (2, 9),
    "aoti_torch_dtype_float64": (2, 9),
    "aoti_torch_dtype_int32": (2, 9),
    "aoti_torch_dtype_int64": (2, 9),
    "aoti_torch_empty_strided": (2, 9),
    "aoti_torch_get_data_ptr": (2, 9),
    "aoti_torch_get_device_index": (2, 9),
    "aoti_torch_get_device_type": (2, 9),
    "aoti_torch_get_dim": (2, 9),
    "aoti_torch_get_dtype": (2, 9),
    "aoti_torch_get_sizes": (2, 9),
    "aoti_torch_get_strides": (2, 9),
    "aoti_torch_library_def": (2, 9),
    "aoti_torch_library_impl": (2, 9),
    "aoti_torch_library_init_fragment": (2, 9),
    "aoti_torch_library_init_impl": (2, 9),
    "aoti_torch_zero_": (2, 9),
}

# Looked up with dlsym at the first call, so no import shows it.
SINCE_AT_RUN_TIME = {"aoti_torch_get_current_cuda_stream": (2, 9)}
