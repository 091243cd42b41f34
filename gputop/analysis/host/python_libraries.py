"""Owner of a Python function: the user, or of Python itself or an installed package.

py-spy and older versions of PyTorch's tracer write whole paths. A newer one writes paths without the folder on sys.path
that they lie below, and the tracer of TensorFlow and JAX nothing but the name of the file. There packages tell by
their names, and the files of Python, JAX, TensorFlow, Keras, Flax, Optax and NumPy by theirs, as far as no
other project is likely to have a file of that name.
"""

from __future__ import annotations

import re
import sys
from pathlib import PurePosixPath

# Files whose functions only call others: TensorFlow's and Keras' wrappers around any function, and their calls of ops.
PASS_ON = ("traceback_utils.py", "execute.py", "polymorphic_function.py", "context.py", "dispatch.py",
           "atomic_function.py", "def_function.py", "api.py", "pjit.py", "module.py", "contextlib.py", "threading.py")
_CELLS = ("<ipython-input", "<stdin>")  # of a notebook, or typed in
_OWN = ("gputop_kineto", "gputop_inside")  # what gputop itself runs inside of a job
_PYTHON = (sys.stdlib_module_names - {"test", "code", "profile", "this"}) | {"site-packages", "dist-packages"}
_PACKAGE_NAMES = """
    absl accelerate apex bitsandbytes chex cloudpickle clu cv2 datasets deepspeed diffusers dill einops equinox
    etils fairscale filelock flash_attn flax flaxlib fsspec google grain grpc h5py haiku huggingface_hub imageio
    ipykernel IPython jax jaxlib keras lightning lightning_fabric lightning_utilities matplotlib megatron ml_dtypes
    mlflow msgpack ncclx numba numpy nvidia optax optree orbax orjson packaging pandas peft PIL polars psutil
    pyarrow pydantic pytorch_lightning ray requests rich safetensors scipy sentencepiece six skimage sklearn
    tensorboard tensorboardX tensorflow tensorflow_datasets tensorstore tf_keras timm tokenizers torch torchaudio
    torchdata torchgen torchmetrics torchtext torchvision tornado tqdm transformer_engine transformers tree triton
    trl typing_extensions urllib3 vllm wandb wrapt xformers yaml zmq
"""
# Of Python where a file is no module of its own name, of JAX, Flax, Optax, Orbax, TensorFlow, Keras and NumPy.
_FILE_NAMES = """
    _alias _asarray _base _bootstrap _bootstrap_external _methods _transform abstract_arrays ad ad_checkpoint
    ad_util ag_ctx all_reduce api api_util argument_validation array array_api_metadata array_constructors
    array_creation array_data_adapter array_methods array_ops array_ops_stack arrayprint async_checkpointer
    async_utils asyncio_utils atomic_function auto_control_deps autograph_util backprop backprop_util
    backup_and_restore base_events base_optimizer base_pytree_checkpoint_handler basearray batch_op cache_key
    cache_op callback_list cancellation capture_container checkify collective_all_reduce_strategy compilation_cache
    compilation_cache_interface compile_utils composite_checkpoint_handler composite_tensor concatenate_op
    concrete_function conditionals connection constant_op constant_tensor_conversion context control_flow_ops
    control_flow_util cross_device_ops cross_device_utils csv_logger custom_api_util custom_batching
    custom_derivatives custom_gradient custom_partitioning data_adapter data_adapter_utils data_adapters
    data_structures dataset_ops debugging decoder def_function default_types device_context dispatch distribute_lib
    distribute_utils dlpack dmtree_impl dtype_policy dtypes early_stopping effects einsum encoder environment_info
    epoch_iterator execute extension_type ffi filter_op flat_map_op flatten_util forwardprop from_generator_op
    from_tensor_slices_op from_tensors_op fromnumeric frozen_dict func_graph func_utils function_base function_cache
    function_context function_deserialization function_type function_type_utils function_utils futures
    generator_data_adapter generic_utils getlimits global_state gradients_impl gradients_util graphlib
    hashable_array imperative_grad index_tricks indexed_slices indexing initializers input_lib input_ops
    interleave_op io_utils iterator_ops jax_array_handlers keras_tensor lambda_callback lax lax_numpy lazy_loader
    learning_rate_scheduler lift_to_graph linear_util loss_scale_optimizer lru_cache managers map_op math_ops mesh
    mesh_utils metrics_utils mirrored_run mirrored_strategy mlir model_checkpoint monitor_callback monitoring
    multi_device_iterator_ops multiarray named_sharding nest nest_util nn_impl nn_ops np_arrays numeric numerictypes
    numpy_ops object_identity object_registration one_device_strategy op_callbacks op_def_library op_shardings
    operation operation_utils optional_ops optree_impl overrides padded_batch_op pallas_call
    parameter_server_strategy_v2 partial_eval partition_spec pickle_util pjit pmap polymorphic_function popen_fork
    prefetch_op pretty_printer prng profiler profiler_v2 progbar progbar_logger pxla py_dataset_adapter python_utils
    pytree_checkpoint_handler ragged_tensor random_ops random_seed range_op reduce_lr_on_plateau reduction
    reduction_metrics reductions registration repeat_op resource_tracker resource_variable_ops rnglib save_context
    scalar_types script_ops seed_generator serialization_lib shape_base shape_util shard_alike shard_map sharding
    sharding_impls sharding_specs shared_memory shuffle_op skip_op smart_cond source_info_util sparse_tensor stages
    stateless_scope stride_tricks structured_function summary_ops_v2 summary_writer symbolic_arguments synchronize
    take_op tape tensor_contractions tensor_conversion tensor_conversion_registry tensor_getitem_override
    tensor_shape tensor_spec tensor_util tensorstore_utils terminate_on_nan tf_contextlib tf_dataset_adapter
    tf_decorator tf_export tf_inspect tf_logging tf_method_target tf_should_use tf_stack tf_utils thread
    threefry2x32 tqdm trace_type trace_type_builder traceback_util traceback_utils tracing_compilation tracing_utils
    tree_api tree_util twodim_base type_check type_dispatch type_handlers type_spec type_spec_registry ufunc_api
    ufunclike ufuncs variable_mapping variable_scope variablelib vectorize weak_tensor weak_tensor_ops while_v2
    windowed_reductions xla xla_bridge xla_client xla_metadata xla_metadata_lib zip_op
"""
# Names of files in JAX, TensorFlow and Keras and in many projects as well: the calling function tells whose it is.
_SHARED_NAMES = (
    "base common compiler config core device errors function functions layer linalg ops random "
    "record structure tensor tracking trainer types util utils variables "
)
_PACKAGES, _FILES, _SHARED = (frozenset(names.split()) for names in (_PACKAGE_NAMES, _FILE_NAMES, _SHARED_NAMES))
_FAMILIES = re.compile(r"gen_\w+_ops|\w+_op_def|_pywrap_\w+|\w+_pb2")


def is_library(file: str) -> bool:
    """Return whether a file, by its whole path, is of Python itself or of an installed package."""
    return ((file.startswith("<") and not file.startswith(_CELLS)) or "/site-packages/" in file
            or "/dist-packages/" in file or "/lib/python3" in file or "/lib64/python3" in file
            or PurePosixPath(file).stem in _OWN)


def is_library_below_path(file: str) -> bool:
    """The same of a path without the folder on sys.path that it lies below: "torch/nn/modules/linear.py"."""
    first = file.partition("/")[0].removesuffix(".py")
    return is_library(file) or first in _PYTHON or first in _PACKAGES


def is_library_file(name: str) -> bool | None:
    """The same by the name of the file alone: "pjit.py". None: it may be either."""
    stem = PurePosixPath(name).name.removesuffix(".py")
    if stem in _SHARED:
        return None
    return (is_library(name) or stem == "__init__" or stem in _PYTHON or stem in _PACKAGES or stem in _FILES
            or _FAMILIES.fullmatch(stem) is not None)
