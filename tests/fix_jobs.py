"""What a job of each framework has when the code of a fix comes into it, and a process that runs the code there.

``python fix_jobs.py FRAMEWORK`` reads pieces of code as JSON by their names, runs each in a job of its own, and prints
the errors by the same names. It imports no test library: it runs in environments of the frameworks.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback

# Names that any job may use.
_ANY = """
import contextlib, functools, os
from concurrent.futures import ThreadPoolExecutor
step = 100; epoch = 5; batch_size = steps = epochs = 2; length = 5; vocabulary = 7; units = 5; n = 2; path = "saved"
folder = logdir = "logs"; losses = []; outputs = []; rate = 0.1; steps_left = iter([True, False])
class Training:
    def __bool__(self): return next(steps_left)
training = running = Training()
save = log = lambda *values: None
"""
_JOBS = {
    "tensorflow": _ANY + """
import numpy as np, tensorflow as tf, keras
x, y, xs = np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), np.ones((8, 256), "float32")
inputs = keras.Input((3,)); model = keras.Sequential([inputs, keras.layers.Dense(2)])
optimizer, loss, metrics = keras.optimizers.SGD(), "mse", []
model.compile(optimizer, loss)
ds = dataset = tf.data.Dataset.from_tensor_slices((x, y))
values = [1.0, 2.0]; condition = True; a = b = 1.0; loss_sum = tf.Variable(0.0); right = tf.Variable(0, dtype=tf.int64)
labels, logits = tf.constant([0, 1], tf.int64), tf.constant([[1.0, 0.0], [0.0, 1.0]])
train_step, replica_step, decode, fn, fn_of_a_batch, keep_uint8 = [lambda *values: values] * 6
compute_loss = lambda y, made: tf.reduce_mean((y - made) ** 2); build_model = build_and_compile = lambda: model
read = lambda file: tf.data.Dataset.from_tensors(file); files = ["a", "b"]; shuffled = buffer_size = 4
per_gpu_batch = 2; strategy = tf.distribute.MirroredStrategy(); checkpoint = tf.train.Checkpoint(model=model)
feature = {"a": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))}; paths = ["a.tfrecord"]
batch = tf.ones((2, 3)); tape = tf.GradientTape(); tape.__enter__()
if "assign_add(loss)" in CODE: loss = 1.0
if "model.fit(" in CODE and "ds.batch(" not in CODE: ds = ds.batch(2)
if "padded_batch" in CODE: ds = tf.data.Dataset.from_generator(lambda: iter([[1], [1, 2]]), tf.int64, (None,))
if "padded_shapes=(" in CODE: ds = ds.map(lambda v: (v,))
if "step %" in CODE or "model." in CODE: dataset = ds
""",
    "jax": _ANY + """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = jax.make_mesh((1,), ("data",)); sharding = NamedSharding(mesh, PartitionSpec())
params = {"w": jnp.ones((3, 2))}; x = jnp.ones((4, 3)); y = jnp.ones((4, 2)); batch = np.ones((4, 3), "float32")
inputs = jnp.ones((4, 3)); images_uint8 = np.ones((4, 3), "uint8"); batches = iter([batch]); state = jnp.zeros(())
loss_fn = lambda params, batch: (batch @ params["w"]).sum(); model = lambda params, x: x @ params["w"]
def train_step(params, batch): return params, jnp.float32(0)
layer = lambda state, params: (state, state); stacked_params = jnp.ones((2, 3)); block = lambda x: x * 2
tokens = jnp.ones((2, 5)); q = k = v = jnp.ones((1, 4, 2, 8)); mask = None; values = [1.0]
parts = [np.ones((4, 3), "float32")]; loss = result = jnp.float32(1)
if "jit(step)" in CODE: step = lambda x: x
metrics = {"loss": jnp.float32(1)}; bucket = 8; right = 0; labels = jnp.array([0]); logits = jnp.ones((1, 2))
learning_rate = 0.1; table = jnp.ones((5, 2)); ids = jnp.array([1]); make_batch = lambda: batch
if "lax.scan(train_step" in CODE:
    batches = jnp.ones((2, 4, 3)); train_step = lambda state, batch: (state, batch.sum())
if "ThreadPoolExecutor" in CODE: run_step = lambda batch: None
with contextlib.suppress(ImportError): import optax; optimizer = optax.sgd(0.1); state = optimizer.init(params)
with contextlib.suppress(ImportError): import orbax.checkpoint as ocp; folder = os.path.abspath("saved")
with contextlib.suppress(ImportError):
    import grain.python as grain; dataset = grain.MapDataset.range(4).to_iter_dataset()
""",
    "pytorch": _ANY + """
import numpy as np, torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset
device = torch.device("cpu"); images_uint8 = torch.ones(4, 3, dtype=torch.uint8)
x = torch.ones(4, 3); y = torch.ones(4, 2); w = torch.ones(4, 3, requires_grad=True); batch = torch.ones(4, 3)
model = torch.nn.Linear(3, 2); criterion = loss_fn = torch.nn.functional.mse_loss; block = model
loss_of = lambda out: out.sum()
optimizer = torch.optim.SGD(model.parameters(), 0.1); lr = 0.1; loss = total = running = torch.ones(()); right = 0
samples = 4; labels = torch.zeros(4); logits = torch.ones(4, 2); rows = 5; width = 2; array = np.ones(3)
parameters_without_table = list(model.parameters()); hidden = output = torch.ones(2, requires_grad=True) * 2
micro_batches = [batch, batch]; requests = [batch, batch]; q = k = v = torch.ones(1, 2, 4, 8); mask = None
dataset = TensorDataset(x); log_histograms = validate = lambda *values: None; loader = []; result = torch.ones(2)
tokenizer, texts = lambda texts, **options: texts, ["a"]
train = lambda model: None; host = torch.ones(2); state = {"model": model.state_dict()}
class Mapped:
    def map(self, *values, **options): return self
if "map(transform" in CODE: dataset, transform = Mapped(), None
if "no_sync" in CODE: model.no_sync = contextlib.nullcontext
if "layout" in NAME or "fp16_fallback" in NAME: model, x = torch.nn.Conv2d(3, 2, 1), torch.ones(1, 3, 4, 4)
if "DistributedSampler" in CODE: DistributedSampler = functools.partial(DistributedSampler, num_replicas=2, rank=0)
""",
}


def errors(framework: str, codes: dict[str, str]) -> dict[str, str]:
    out = {}
    for name, code in codes.items():
        names: dict[str, object] = {"__name__": "job", "CODE": code, "NAME": name}
        try:
            exec(_JOBS[framework], names)
            with contextlib.redirect_stdout(sys.stderr):
                exec(compile(code, name, "exec"), names)
        except Exception:  # noqa: BLE001 - of any kind: it is what the test reports
            out[name] = traceback.format_exc(limit=-1)
    return out


if __name__ == "__main__":
    pieces = json.load(sys.stdin)
    os.chdir(tempfile.mkdtemp())
    found = errors(sys.argv[1], pieces)
    print("\n" + json.dumps(found))
