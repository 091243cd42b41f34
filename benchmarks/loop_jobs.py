"""Training loops of PyTorch, Keras and JAX on the CPU, each with one known fault, for promised_jobs.py.

    python benchmarks/loop_jobs.py KIND PORT LOG

Trains until it is ended, with the fix where CURE=1 is in the environment. Jobs of Keras and JAX serve their profiler on
PORT, those of PyTorch serve nothing. LOG gets a line "<unix time> e" at the end of each step; LOG.d is for files.

PyTorch, each kind with its fix:
t_unzip   compressed files, read one by one from a slow store: four workers
t_json    each sample is parsed from JSON: parsed once
t_fft     a spectrum of each sample, each time: computed once
t_stream  an iterable dataset waits for a store: four workers
t_lstm    LSTMCell for each time step: LSTM
t_rows    the loss row by row: one loss of the batch
t_mask    a mask made by loops in Python: one op
t_val     validation every 25 steps: every 500
t_save    model and optimizer saved every 10 steps: every 2,000
t_dump    weights written as JSON every 8 steps: every 8,000
t_metric  a confusion matrix row by row: at once
t_norms   norms of each parameter read at each step: at every 1,000th
t_gc      a full garbage collection every 10 steps: none
t_pca     a decomposition every 50 steps: every 50,000
t_npz     a compressed archive is read for each sample: once
t_choice  a sampler shuffles all indices for each batch: draws some
t_clip    gradients clipped one by one by Python: clip_grad_norm_
t_ema     moving averages of all weights at each step: every 50
t_board   NumPy's threads, for histograms of TensorBoard, take the CPUs of PyTorch's: one of them
t_gan, t_accum  healthy: two networks that train in turns; an update for every four batches

Keras:
k_eager   run_eagerly: compiled
k_custom  a loop without tf.function: with it
k_retrace a Python number as argument of a tf.function: a tensor
k_spe     one step of a tiny model in each call: 16 steps
k_jpeg    JPEGs decoded one by one in each epoch: cached
k_read    slow reads one by one: 16 at once
k_gen     batches of a Python generator: ops of TensorFlow
k_flatmap lines parsed by Python: ops of TensorFlow
k_csv     CSV decoded line by line: batch by batch
k_hand    batches made by hand before train_on_batch: as they are
k_pieces  fit() for each piece of the data: one fit()
k_dqn     predict() for each step of an environment: a tf.function
k_hist    histograms of all weights after each batch: after every 500th
k_fsync   a log synced to the disk after each batch: after every 500th
k_numpy   many results read after each step: after every 100th
k_ckpt    a checkpoint every 20 batches: every 2,000
k_val     validation every 10 steps: every 500
k_augment images augmented by one thread: by several
k_waits   a generator waits for a store: four of them interleaved
k_probe   the model called in a callback after each batch: after every 200th

JAX:
j_nojit   the step is not compiled: jit
j_cell    a compiled cell is called for each time step: jit around the whole
j_static  a static argument that changes at each step: a traced one
j_debug   a callback in the compiled step: none
j_aug     augmentation by NumPy between steps: none
j_wait    the loop waits for its store: four threads read ahead
j_norms   norms of each parameter read after each step: after every 100th
j_save    parameters saved every 10 steps: every 1,000
j_eval    an evaluation outside of jit every 20 steps: every 2,000
j_tokens  texts are split into tokens between the steps: beforehand
j_micro   gradients of four batches are added up outside of jit: jit around the whole
j_hash    all parameters are hashed on the host at each step: at every 100th
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import itertools
import json
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

ENDLESS = 10 ** 6  # steps or samples: more than a run makes
SAMPLES, FEATURES, CLASSES = 4096, 64, 10

KINDS: dict[str, Callable[[Any], None]] = {}


def kind(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Register a job by its function's name."""
    KINDS[function.__name__] = function
    return function


class Run:
    """One run of a job: ``cured`` with the fix."""

    def __init__(self, port: int, log: TextIO) -> None:
        self.port, self._log = port, log
        self.cured = os.environ.get("CURE") == "1"
        self.rng = np.random.default_rng(0)
        self.folder = Path(f"{log.name}.d")
        self.folder.mkdir(parents=True, exist_ok=True)

    def mark(self) -> None:
        """Log the end of a step."""
        self._log.write(f"{time.time():.6f} e\n")

    def due(self, step: int, every: int, cured_every: int) -> bool:
        """Return whether this step is one after which the costly work is done."""
        return step % (cured_every if self.cured else every) == 0


# -- PyTorch ----------------------------------------------------------------------------------------------

class TorchRun(Run):
    def __init__(self, port: int, log: TextIO) -> None:
        super().__init__(port, log)
        import torch

        torch.manual_seed(0)
        self.loss = torch.nn.CrossEntropyLoss()

    def mlp(self, *widths: int) -> Any:
        from torch import nn

        layers: list[Any] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def sgd(self, *models: Any, rate: float = 0.01) -> Any:
        import torch

        return torch.optim.SGD([weight for model in models for weight in model.parameters()], rate)

    def batch(self, size: int, *shape: int) -> tuple[Any, Any]:
        import torch

        return torch.randn(size, *shape), torch.randint(0, CLASSES, (size,))

    def train(self, model: Any, loader: Iterable[Any]) -> None:
        """Train on a loader that has the fault."""
        optimizer = self.sgd(model)
        for x, y in loader:
            optimizer.zero_grad()
            self.loss(model(x), y).backward()
            optimizer.step()
            self.mark()


@kind
def t_unzip(run: TorchRun) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    paths = [run.folder / str(i) for i in range(256)]
    for path in paths:
        path.write_bytes(zlib.compress(run.rng.integers(0, 40, 60_000, dtype=np.uint8).tobytes(), 6))

    class Files(Dataset):
        def __len__(self) -> int:
            return ENDLESS

        def __getitem__(self, index: int) -> tuple[Any, int]:
            time.sleep(0.003)  # as a store in the network takes
            data = np.frombuffer(zlib.decompress(paths[index % 256].read_bytes()), np.uint8)
            return torch.from_numpy(data[:3072].astype("float32") / 40), index % CLASSES

    run.train(run.mlp(3072, 256, CLASSES), DataLoader(Files(), 16, num_workers=4 if run.cured else 0))


@kind
def t_json(run: TorchRun) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    texts = [json.dumps({"x": [round(float(value), 4) for value in run.rng.random(400)], "y": i % CLASSES})
             for i in range(2000)]
    parsed = [(torch.tensor(one["x"]), one["y"]) for one in map(json.loads, texts)]

    class Texts(Dataset):
        def __len__(self) -> int:
            return ENDLESS

        def __getitem__(self, index: int) -> tuple[Any, int]:
            if run.cured:
                return parsed[index % 2000]
            one = json.loads(texts[index % 2000])
            return torch.tensor(one["x"]), one["y"]

    run.train(run.mlp(400, 256, CLASSES), DataLoader(Texts(), 64))


@kind
def t_fft(run: TorchRun) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    waves = run.rng.standard_normal((512, 16_000)).astype("float32")

    def spectrum(wave: np.ndarray) -> Any:
        windows = wave.reshape(-1, 400) * np.hanning(400)
        return torch.from_numpy(np.log1p(np.abs(np.fft.rfft(windows, axis=1))).astype("float32"))

    computed = [spectrum(wave) for wave in waves] if run.cured else []

    class Waves(Dataset):
        def __len__(self) -> int:
            return ENDLESS

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return computed[index % 512] if run.cured else spectrum(waves[index % 512]), index % CLASSES

    run.train(nn.Sequential(nn.Flatten(), *run.mlp(40 * 201, 64, CLASSES)), DataLoader(Waves(), 16))


@kind
def t_stream(run: TorchRun) -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Any, int]]:
            while True:
                time.sleep(0.002)
                yield torch.randn(128), 1

    run.train(run.mlp(128, 256, CLASSES), DataLoader(Stream(), 8, num_workers=4 if run.cured else 0))


@kind
def t_lstm(run: TorchRun) -> None:
    import torch
    from torch import nn

    model = nn.LSTM(32, 64, batch_first=True) if run.cured else nn.LSTMCell(32, 64)
    head = nn.Linear(64, CLASSES)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])

    def last_state(x: Any) -> Any:
        if run.cured:
            return model(x)[0][:, -1]
        hidden = cell = torch.zeros(32, 64)
        for step in range(80):
            hidden, cell = model(x[:, step], (hidden, cell))
        return hidden

    while True:
        x, y = run.batch(32, 80, 32)
        loss = run.loss(head(last_state(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mark()


@kind
def t_rows(run: TorchRun) -> None:
    import torch

    model = run.mlp(64, 256, CLASSES)
    optimizer = run.sgd(model)

    def loss_by_row(out: Any, y: Any) -> Any:
        return sum(-torch.log_softmax(row, 0)[label] for row, label in zip(out, y, strict=True)) / 96

    loss_of = run.loss if run.cured else loss_by_row
    while True:
        x, y = run.batch(96, 64)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mark()


@kind
def t_mask(run: TorchRun) -> None:
    import torch
    from torch import nn

    embed, attention = nn.Linear(32, 64), nn.MultiheadAttention(64, 4, batch_first=True)
    head = nn.Linear(64, CLASSES)
    optimizer = run.sgd(embed, attention, head)

    def causal(length: int) -> Any:
        if run.cured:
            return torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        return torch.tensor([[column > row for column in range(length)] for row in range(length)])

    while True:
        x, y = run.batch(8, 160, 32)
        hidden = embed(x)
        hidden = attention(hidden, hidden, hidden, attn_mask=causal(160), need_weights=False)[0]
        loss = run.loss(head(hidden.mean(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mark()


@kind
def t_val(run: TorchRun) -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(),
                          nn.Linear(32 * 49, CLASSES))
    optimizer, held_out = run.sgd(model), torch.randn(40, 64, 3, 32, 32)

    def validate() -> None:
        model.eval()
        with torch.no_grad():
            for x in held_out:
                model(x).argmax(1)
        model.train()

    for step in itertools.count(1):
        x, y = run.batch(32, 3, 32, 32)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if run.due(step, 25, 500):
            validate()
        run.mark()


@kind
def t_save(run: TorchRun) -> None:
    import torch

    model = run.mlp(512, 2048, 2048, CLASSES)
    optimizer = torch.optim.Adam(model.parameters())
    for step in itertools.count(1):
        x, y = run.batch(32, 512)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if run.due(step, 10, 2000):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run.folder / "checkpoint.pt")
        run.mark()


@kind
def t_dump(run: TorchRun) -> None:
    model = run.mlp(64, 128, CLASSES)
    optimizer = run.sgd(model)
    for step in itertools.count(1):
        x, y = run.batch(256, 64)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if run.due(step, 8, 8000):
            with (run.folder / "weights.json").open("w") as file:
                json.dump({name: weight.tolist() for name, weight in model.state_dict().items()}, file)
        run.mark()


@kind
def t_metric(run: TorchRun) -> None:
    model = run.mlp(64, 256, 256, CLASSES)
    optimizer, confusion = run.sgd(model), np.zeros((CLASSES, CLASSES), int)
    xs, ys = run.batch(8192, 64)

    def update_confusion(predicted: Any, y: Any) -> None:
        if run.cured:
            np.add.at(confusion, (y.numpy(), predicted.numpy()), 1)
            return
        for one, label in zip(predicted, y, strict=True):
            confusion[label.item(), one.item()] += 1

    for first in itertools.cycle(range(0, 8192, 512)):
        x, y = xs[first:first + 512], ys[first:first + 512]
        out = model(x)
        loss = run.loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_confusion(out.argmax(1), y)
        run.mark()


@kind
def t_norms(run: TorchRun) -> None:
    model = run.mlp(*[64] * 61, CLASSES)
    optimizer = run.sgd(model, rate=1e-4)

    def norms() -> dict[str, tuple[float, float, float]]:
        return {name: (weight.grad.norm().item(), weight.norm().item(),
                       (weight.grad.abs() > 1e-3).float().mean().item())
                for name, weight in model.named_parameters()}

    for step in itertools.count(1):
        x, y = run.batch(64, 64)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        if run.due(step, 1, 1000):
            norms()
        optimizer.step()
        run.mark()


@kind
def t_gc(run: TorchRun) -> None:
    _kept = [{"a": [i], "b": str(i)} for i in range(600_000)]  # for the collection to look at
    model = run.mlp(256, 512, 512, CLASSES)
    optimizer = run.sgd(model)
    for step in itertools.count(1):
        x, y = run.batch(128, 256)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if run.due(step, 10, ENDLESS):
            gc.collect()
        run.mark()


@kind
def t_pca(run: TorchRun) -> None:
    model, features = run.mlp(64, 256, 256, CLASSES), run.rng.standard_normal((900, 300))
    optimizer = run.sgd(model)

    def project() -> np.ndarray:
        return np.linalg.svd(features, full_matrices=False)[2][:2]

    for step in itertools.count(1):
        x, y = run.batch(128, 64)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if run.due(step, 50, 50_000):
            project()
        run.mark()


@kind
def t_npz(run: TorchRun) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    paths = [run.folder / f"{i}.npz" for i in range(128)]
    for path in paths:
        np.savez_compressed(path, x=run.rng.integers(0, 50, (64, 64, 3)).astype("uint8"))

    def read(index: int) -> np.ndarray:
        image: np.ndarray = np.load(paths[index])["x"]
        return image

    read_once = functools.cache(read)

    class Images(Dataset):
        def __len__(self) -> int:
            return ENDLESS

        def __getitem__(self, index: int) -> tuple[Any, int]:
            image = (read_once if run.cured else read)(index % 128)
            return torch.from_numpy(image.astype("float32") / 255).reshape(-1), index % CLASSES

    run.train(run.mlp(64 * 64 * 3, 128, CLASSES), DataLoader(Images(), 32))


@kind
def t_choice(run: TorchRun) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    count = 400_000
    xs, ys = run.batch(count, 16)

    class Draw:
        def __len__(self) -> int:
            return ENDLESS

        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield (run.rng.integers(0, count, 256) if run.cured else run.rng.permutation(count)[:256]).tolist()

    run.train(run.mlp(16, 128, CLASSES), DataLoader(TensorDataset(xs, ys), batch_sampler=Draw()))


@kind
def t_clip(run: TorchRun) -> None:
    import torch

    model = run.mlp(*[64] * 81, CLASSES)
    optimizer = run.sgd(model, rate=1e-4)

    def clip_one_by_one() -> None:
        norm = sum(float((weight.grad ** 2).sum()) for weight in model.parameters()) ** 0.5
        for weight in model.parameters():
            weight.grad.mul_(min(1.0, 1.0 / norm))

    while True:
        x, y = run.batch(64, 64)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        if run.cured:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip_one_by_one()
        optimizer.step()
        run.mark()


@kind
def t_ema(run: TorchRun) -> None:
    import torch

    model = run.mlp(*[48] * 101, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=True)
    averages = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update_averages() -> None:
        for name, weight in model.named_parameters():
            averages[name] = averages[name] * 0.99 + weight.detach() * 0.01

    for step in itertools.count(1):
        x, y = run.batch(32, 48)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if run.due(step, 1, 50):
            update_averages()
        run.mark()


@kind
def t_board(run: TorchRun) -> None:
    from torch.utils.tensorboard import SummaryWriter

    if run.cured and "OPENBLAS_NUM_THREADS" not in os.environ:  # NumPy reads it as it is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})

    writer, model = SummaryWriter(str(run.folder)), run.mlp(64, 256, 256, CLASSES)
    optimizer = run.sgd(model)
    for step in itertools.count(1):
        x, y = run.batch(256, 64)
        optimizer.zero_grad()
        run.loss(model(x), y).backward()
        optimizer.step()
        if step % 5 == 0:
            for name, weight in model.named_parameters():
                writer.add_histogram(name, weight, step)
        run.mark()


@kind
def t_gan(run: TorchRun) -> None:
    import torch
    from torch import nn

    generator = run.mlp(64, 512, 784)
    critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(), nn.Linear(512, 1))
    of_generator, of_critic = (torch.optim.Adam(model.parameters(), 1e-4) for model in (generator, critic))
    loss_of, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(256, 1), torch.zeros(256, 1)
    samples = torch.rand(8192, 784)
    for first in itertools.cycle(range(0, 8192, 256)):
        real = samples[first:first + 256]
        made = generator(torch.randn(256, 64))
        critic_loss = loss_of(critic(real), ones) + loss_of(critic(made.detach()), zeros)
        of_critic.zero_grad()
        critic_loss.backward()
        of_critic.step()
        generator_loss = loss_of(critic(made), ones)
        of_generator.zero_grad()
        generator_loss.backward()
        of_generator.step()
        run.mark()


@kind
def t_accum(run: TorchRun) -> None:
    model = run.mlp(512, 1024, CLASSES)
    optimizer = run.sgd(model)
    xs, ys = run.batch(8192, 512)
    for step, first in enumerate(itertools.cycle(range(0, 8192, 128)), 1):
        (run.loss(model(xs[first:first + 128]), ys[first:first + 128]) / 4).backward()
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            run.mark()


# -- Keras ------------------------------------------------------------------------------------------------

class KerasRun(Run):
    """``x`` and ``y`` are the samples of most kinds."""

    def __init__(self, port: int, log: TextIO) -> None:
        super().__init__(port, log)
        import tensorflow as tf

        tf.profiler.experimental.server.start(self.port)
        self.loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.x = self.rng.random((SAMPLES, FEATURES), "float32")
        self.y = self.rng.integers(0, CLASSES, SAMPLES)

    def model(self, inputs: int = FEATURES, width: int = 256, **options: Any) -> Any:
        from tensorflow import keras

        model = keras.Sequential([keras.layers.Input((inputs,)), keras.layers.Dense(width, "relu"),
                                  keras.layers.Dense(width, "relu"), keras.layers.Dense(CLASSES)])
        model.compile("sgd", self.loss, **options)
        return model

    def batches(self) -> Any:
        """A pipeline that is never late."""
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((self.x, self.y)).repeat().batch(64).prefetch(2)

    def marks(self, steps: int = 1) -> Any:
        """A callback that logs so many steps after each call."""
        from tensorflow import keras

        run = self

        class Marks(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                for _ in range(steps):
                    run.mark()

        return Marks()

    def fit(self, model: Any, dataset: Any, *callbacks: Any) -> None:
        model.fit(dataset, steps_per_epoch=ENDLESS, verbose=0, callbacks=[*callbacks, self.marks()])


@kind
def k_eager(run: KerasRun) -> None:
    run.fit(run.model(run_eagerly=not run.cured), run.batches())


@kind
def k_custom(run: KerasRun) -> None:
    import tensorflow as tf

    model, optimizer = run.model(), tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = run.loss(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))
        return loss

    train_step = tf.function(step) if run.cured else step
    for x, y in run.batches():
        float(train_step(x, y))
        run.mark()


@kind
def k_retrace(run: KerasRun) -> None:
    import tensorflow as tf

    model, optimizer = run.model(), tf.keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any, scale: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = run.loss(y, model(x, training=True)) * scale
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))
        return loss

    for number, (x, y) in enumerate(run.batches()):
        scale = 1 / (1 + number * 1e-4)
        step(x, y, tf.constant(scale) if run.cured else scale)
        run.mark()


@kind
def k_spe(run: KerasRun) -> None:
    steps, model = 16 if run.cured else 1, run.model(width=32)
    model.compile("sgd", run.loss, steps_per_execution=steps)
    model.fit(run.batches(), steps_per_epoch=16 * ENDLESS, verbose=0, callbacks=[run.marks(steps)])


@kind
def k_jpeg(run: KerasRun) -> None:
    import tensorflow as tf

    pixels = (tf.cast(tf.random.uniform((160, 160, 3), 0, 255, tf.int32), tf.uint8) for _ in range(64))
    images = [tf.io.encode_jpeg(one).numpy() for one in pixels]

    def decode(image: Any, label: Any) -> tuple[Any, Any]:
        small = tf.image.resize(tf.io.decode_jpeg(image, channels=3), (16, 16))
        return tf.reshape(small, (768,)) / 255.0, label

    dataset = tf.data.Dataset.from_tensor_slices((images, run.y[:64])).repeat()
    dataset = dataset.take(64).map(decode).cache().repeat() if run.cured else dataset.map(decode)
    run.fit(run.model(768), dataset.batch(32).prefetch(tf.data.AUTOTUNE))


@kind
def k_read(run: KerasRun) -> None:
    import tensorflow as tf

    def read(index: Any) -> tuple[Any, Any]:
        time.sleep(0.004)
        return run.x[index % SAMPLES], run.y[index % SAMPLES]

    def load(index: Any) -> tuple[Any, Any]:
        x, y = tf.numpy_function(read, [index], [tf.float32, tf.int64])
        return tf.ensure_shape(x, (FEATURES,)), tf.ensure_shape(y, ())

    dataset = tf.data.Dataset.range(10 * ENDLESS).map(load, num_parallel_calls=16 if run.cured else None)
    run.fit(run.model(), dataset.batch(16).prefetch(tf.data.AUTOTUNE))


@kind
def k_gen(run: KerasRun) -> None:
    import tensorflow as tf

    def generate() -> Iterator[tuple[Any, Any]]:
        while True:
            chosen = run.rng.integers(0, SAMPLES, 64)
            rows = [np.roll(run.x[i], int(run.rng.integers(64))) * (1 + 0.1 * run.rng.standard_normal(64))
                    for i in chosen]
            yield np.stack(rows).astype("float32"), run.y[chosen]

    xs, ys = tf.constant(run.x), tf.constant(run.y)

    def choose(_: Any) -> tuple[Any, Any]:
        chosen = tf.random.uniform((64,), 0, SAMPLES, tf.int32)
        return tf.gather(xs, chosen) * (1 + 0.1 * tf.random.normal((64, 64))), tf.gather(ys, chosen)

    if run.cured:
        dataset = tf.data.Dataset.range(10 * ENDLESS).map(choose, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        dataset = tf.data.Dataset.from_generator(generate, output_signature=(
            tf.TensorSpec((64, FEATURES)), tf.TensorSpec((64,), tf.int64)))
    run.fit(run.model(), dataset.prefetch(tf.data.AUTOTUNE))


@kind
def k_flatmap(run: KerasRun) -> None:
    import tensorflow as tf

    lines = [",".join(f"{value:.4f}" for value in row) for row in run.x]

    def parse(line: bytes) -> np.ndarray:
        return np.array([float(value) for value in line.decode().split(",")], "float32")

    def load(line: Any, label: Any) -> tuple[Any, Any]:
        if run.cured:
            row = tf.strings.to_number(tf.strings.split(line, ","))
        else:
            row = tf.numpy_function(parse, [line], tf.float32)
        return tf.ensure_shape(row, (FEATURES,)), label

    dataset = tf.data.Dataset.from_tensor_slices((lines, run.y)).repeat().map(load)
    run.fit(run.model(), dataset.batch(64).prefetch(tf.data.AUTOTUNE))


@kind
def k_csv(run: KerasRun) -> None:
    import tensorflow as tf

    path, defaults = run.folder / "data.csv", [0.0] * FEATURES + [0]
    with path.open("w") as file:
        for row, label in zip(run.x, run.y, strict=True):
            file.write(",".join(f"{value:.4f}" for value in row) + f",{label}\n")

    def parse(lines: Any) -> tuple[Any, Any]:
        columns = tf.io.decode_csv(lines, defaults)
        return tf.stack(columns[:FEATURES], -1), columns[FEATURES]

    dataset = tf.data.Dataset.from_tensor_slices([str(path)]).repeat().flat_map(tf.data.TextLineDataset)
    dataset = dataset.batch(128).map(parse) if run.cured else dataset.map(parse).batch(128)
    run.fit(run.model(), dataset.prefetch(tf.data.AUTOTUNE))


@kind
def k_hand(run: KerasRun) -> None:
    model = run.model()

    def smooth(row: np.ndarray) -> np.ndarray:
        return (np.interp(np.linspace(0, 63, 64), np.arange(64), np.sort(row))
                + np.convolve(row, np.hanning(7), "same"))

    def make_batch() -> tuple[np.ndarray, np.ndarray]:
        chosen = run.rng.integers(0, SAMPLES, 64)
        if run.cured:
            return run.x[chosen], run.y[chosen]
        rows = [smooth(run.x[i]) for i in chosen for _ in range(2)]  # twice, as work alone
        return np.stack(rows[::2]).astype("float32"), run.y[chosen]

    while True:
        model.train_on_batch(*make_batch())
        run.mark()


@kind
def k_pieces(run: KerasRun) -> None:
    model, marks = run.model(), run.marks()
    if run.cured:
        run.fit(model, run.batches())
    while True:
        first = int(run.rng.integers(0, SAMPLES - 512))
        piece = slice(first, first + 512)
        model.fit(run.x[piece], run.y[piece], batch_size=64, verbose=0, callbacks=[marks])


@kind
def k_dqn(run: KerasRun) -> None:
    import tensorflow as tf
    from tensorflow import keras

    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    call = tf.function(lambda observed: model(observed))
    transition, state = run.rng.standard_normal((8, 8)) * 0.4, run.rng.standard_normal(8)
    memory: list[tuple[Any, Any]] = []
    while True:
        observed = state[None].astype("float32")
        values = call(observed).numpy() if run.cured else model.predict(observed, verbose=0)
        state = np.tanh(state @ transition + 0.1 * int(values.argmax()))
        memory.append((observed[0], values[0]))
        memory = memory[-512:]
        if len(memory) >= 32:
            chosen = [memory[i] for i in run.rng.integers(0, len(memory), 32)]
            model.train_on_batch(np.stack([x for x, _ in chosen]), np.stack([y for _, y in chosen]))
            run.mark()


@kind
def k_hist(run: KerasRun) -> None:
    from tensorflow import keras

    class Histograms(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            if run.due(self.count, 1, 500):
                for weight in self.model.trainable_variables:
                    np.histogram(weight.numpy(), 100)

    run.fit(run.model(), run.batches(), Histograms())


@kind
def k_fsync(run: KerasRun) -> None:
    from tensorflow import keras

    class Log(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            if run.due(self.count, 1, 500):
                weights = self.model.trainable_variables[0].numpy().ravel()[:2000]
                json.dump({"step": self.count, "weights": [float(weight) for weight in weights]}, file)
                file.flush()
                os.fsync(file.fileno())

    with (run.folder / "log.json").open("w") as file:
        run.fit(run.model(), run.batches(), Log())


@kind
def k_numpy(run: KerasRun) -> None:
    import tensorflow as tf

    model, optimizer = run.model(), tf.keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = run.loss(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, [tf.norm(gradient) for gradient in gradients] * 10

    latest: dict[str, float] = {}
    for number, (x, y) in enumerate(run.batches()):
        _, norms = step(x, y)
        if run.due(number, 1, 100):
            latest.update({f"norm {i}": float(norm.numpy()) for i, norm in enumerate(norms)})
        run.mark()


@kind
def k_ckpt(run: KerasRun) -> None:
    from tensorflow import keras

    run.fit(run.model(width=1024), run.batches(), keras.callbacks.ModelCheckpoint(
        str(run.folder / "model.keras"), save_freq=2000 if run.cured else 20))


@kind
def k_val(run: KerasRun) -> None:
    import tensorflow as tf

    held_out = tf.data.Dataset.from_tensor_slices((run.x[:1280], run.y[:1280])).batch(64)
    run.model().fit(run.batches(), steps_per_epoch=10, epochs=ENDLESS, verbose=0, validation_data=held_out,
                    validation_freq=50 if run.cured else 1, callbacks=[run.marks()])


@kind
def k_augment(run: KerasRun) -> None:
    import tensorflow as tf

    images = run.rng.random((512, 48, 48, 3), "float32")

    def augment(image: Any, label: Any) -> tuple[Any, Any]:
        image = tf.image.random_brightness(tf.image.random_flip_left_right(image), 0.2)
        return tf.image.random_contrast(image, 0.8, 1.2), label

    def flatten(image: Any, label: Any) -> tuple[Any, Any]:
        return tf.reshape(image, (-1, 48 * 48 * 3)), label

    dataset = tf.data.Dataset.from_tensor_slices((images, run.y[:512])).repeat()
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE if run.cured else None).batch(64)
    run.fit(run.model(48 * 48 * 3, 64), dataset.map(flatten).prefetch(tf.data.AUTOTUNE))


@kind
def k_waits(run: KerasRun) -> None:
    import tensorflow as tf

    def read(_: Any) -> Iterator[tuple[Any, Any]]:
        while True:
            time.sleep(0.02)
            first = int(run.rng.integers(0, SAMPLES - 64))
            yield run.x[first:first + 64], run.y[first:first + 64]

    def store(number: Any) -> Any:
        return tf.data.Dataset.from_generator(read, args=(number,), output_signature=(
            tf.TensorSpec((64, FEATURES)), tf.TensorSpec((64,), tf.int64)))

    dataset = store(0)
    if run.cured:
        dataset = tf.data.Dataset.range(4).interleave(store, cycle_length=4, num_parallel_calls=4)
    run.fit(run.model(), dataset.prefetch(2))


@kind
def k_probe(run: KerasRun) -> None:
    from tensorflow import keras

    class Probe(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            if run.due(self.count, 1, 200):
                self.model(run.x[:256], training=False).numpy().argmax(-1)

    run.fit(run.model(), run.batches(), Probe())


# -- JAX --------------------------------------------------------------------------------------------------

class JaxRun(Run):
    def __init__(self, port: int, log: TextIO) -> None:
        super().__init__(port, log)
        import jax
        import optax

        jax.profiler.start_server(self.port)
        self.optimizer = optax.adam(1e-3)
        self.x = self.rng.random((SAMPLES, FEATURES), "float32")
        self.y = self.rng.integers(0, CLASSES, SAMPLES)

    def start(self, *widths: int) -> tuple[Any, Any]:
        """Return the parameters of an MLP and the optimizer's state."""
        import jax.numpy as jnp

        parameters = [(jnp.array(self.rng.standard_normal(pair) / pair[0] ** 0.5, jnp.float32), jnp.zeros(pair[1]))
                      for pair in itertools.pairwise((FEATURES, *widths, CLASSES))]
        return parameters, self.optimizer.init(parameters)

    def loss(self, parameters: Any, x: Any, y: Any) -> Any:
        import jax
        import optax

        for weights, bias in parameters[:-1]:
            x = jax.nn.relu(x @ weights + bias)
        weights, bias = parameters[-1]
        return optax.softmax_cross_entropy_with_integer_labels(x @ weights + bias, y).mean()

    def step(self, parameters: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        import jax
        import optax

        loss, gradients = jax.value_and_grad(self.loss)(parameters, x, y)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def batch(self, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
        chosen = self.rng.integers(0, SAMPLES, size)
        return self.x[chosen], self.y[chosen]


@kind
def j_nojit(run: JaxRun) -> None:
    import jax

    step = jax.jit(run.step) if run.cured else run.step
    parameters, state = run.start(256, 256)
    while True:
        parameters, state, loss = step(parameters, state, *run.batch())
        float(loss)
        run.mark()


@kind
def j_cell(run: JaxRun) -> None:
    import jax
    import jax.numpy as jnp

    length = 50

    @jax.jit
    def cell(weights: Any, hidden: Any, x: Any) -> Any:
        return jnp.tanh(jnp.concatenate([hidden, x], -1) @ weights)

    def rnn_loss(weights: Any, xs: Any) -> Any:
        hidden = jnp.zeros((32, 64))
        for i in range(length):
            hidden = cell(weights, hidden, xs[i])
        return (hidden ** 2).mean()

    gradient = jax.jit(jax.grad(rnn_loss)) if run.cured else jax.grad(rnn_loss)
    update = jax.jit(lambda weights, change: weights - 0.01 * change)
    weights = jnp.array(run.rng.standard_normal((128, 64)) / 11, jnp.float32)
    while True:
        xs = jnp.asarray(run.rng.random((length, 32, 64), "float32"))
        weights = update(weights, gradient(weights, xs))
        weights.block_until_ready()
        run.mark()


@kind
def j_static(run: JaxRun) -> None:
    import jax

    @functools.partial(jax.jit, static_argnums=() if run.cured else 3)
    def step(parameters: Any, x: Any, y: Any, scale: float) -> Any:
        gradients = jax.grad(run.loss)(parameters, x, y)
        return jax.tree.map(lambda weight, gradient: weight - 0.01 * scale * gradient, parameters, gradients)

    parameters, _ = run.start(256, 256)
    for number in itertools.count(1):
        parameters = step(parameters, *run.batch(), 1 / (1 + number * 1e-3))
        jax.block_until_ready(parameters)
        run.mark()


@kind
def j_debug(run: JaxRun) -> None:
    import jax

    seen: list[dict[int, float]] = []

    def keep(x: Any) -> None:
        seen.append({share: float(np.percentile(x, share)) for share in range(0, 100, 5)})
        del seen[:-10]

    @jax.jit
    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        if not run.cured:
            jax.debug.callback(keep, x)
        return run.step(parameters, state, x, y)

    parameters, state = run.start(256, 256)
    while True:
        parameters, state, loss = step(parameters, state, *run.batch(128))
        float(loss)
        jax.effects_barrier()
        run.mark()


@kind
def j_aug(run: JaxRun) -> None:
    import jax

    def augment(x: np.ndarray) -> np.ndarray:
        out = x.copy()
        for row in out:
            row[:] = row if run.cured else np.sort(np.convolve(row, np.hanning(9), "same"))
        return out

    step = jax.jit(run.step)
    parameters, state = run.start(256, 256)
    while True:
        x, y = run.batch(256)
        parameters, state, loss = step(parameters, state, augment(x), y)
        float(loss)
        run.mark()


@kind
def j_wait(run: JaxRun) -> None:
    import jax

    def read() -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.012)
        return run.batch(256)

    batches: queue.Queue[tuple[np.ndarray, np.ndarray]] = queue.Queue(8)

    def fill() -> None:
        while True:
            batches.put(read())

    for _ in range(4 if run.cured else 0):
        threading.Thread(target=fill, daemon=True).start()
    step = jax.jit(run.step)
    parameters, state = run.start(256, 256)
    while True:
        x, y = batches.get() if run.cured else read()
        parameters, state, loss = step(parameters, state, x, y)
        float(loss)
        run.mark()


@kind
def j_norms(run: JaxRun) -> None:
    import jax
    import jax.numpy as jnp

    step, latest = jax.jit(run.step), list[float]()
    parameters, state = run.start(*[64] * 12)
    for number in itertools.count(1):
        parameters, state, loss = step(parameters, state, *run.batch())
        if run.due(number, 1, 100):
            latest[:] = [float(jnp.linalg.norm(one)) for one in jax.tree.leaves(parameters)]
        loss.block_until_ready()
        run.mark()


@kind
def j_save(run: JaxRun) -> None:
    import jax

    step = jax.jit(run.step)
    parameters, state = run.start(1024, 1024)
    for number in itertools.count(1):
        parameters, state, loss = step(parameters, state, *run.batch())
        float(loss)
        if run.due(number, 10, 1000):
            np.savez_compressed(run.folder / "parameters.npz", *jax.tree.leaves(parameters))
        run.mark()


@kind
def j_eval(run: JaxRun) -> None:
    import jax
    import jax.numpy as jnp

    def accuracy(parameters: Any) -> float:
        for _ in range(4):
            hidden = jnp.asarray(run.x[:2048])
            for weights, bias in parameters[:-1]:
                hidden = jax.nn.relu(hidden @ weights + bias)
            weights, bias = parameters[-1]
            predicted = (hidden @ weights + bias).argmax(-1)
        return float((predicted == run.y[:2048]).mean())

    step = jax.jit(run.step)
    parameters, state = run.start(256, 256)
    for number in itertools.count(1):
        parameters, state, loss = step(parameters, state, *run.batch())
        float(loss)
        if run.due(number, 20, 2000):
            accuracy(parameters)
        run.mark()


@kind
def j_tokens(run: JaxRun) -> None:
    import jax

    words = [f"w{i}" for i in range(5000)]
    numbers = {word: i for i, word in enumerate(words)}
    texts = [" ".join(run.rng.choice(words, 60)) for _ in range(2000)]

    def tokenize(text: str) -> list[float]:
        return [numbers.get(word, 0) % 97 / 97 for word in text.lower().split(" ")]

    tokenized = [tokenize(text) for text in texts]
    step = jax.jit(run.step)
    parameters, state = run.start(256, 256)
    while True:
        chosen = run.rng.integers(0, 2000, 128)
        x = np.zeros((128, FEATURES), "float32")
        x[:, :60] = [tokenized[i] if run.cured else tokenize(texts[i]) for i in chosen]
        parameters, state, loss = step(parameters, state, x, run.y[chosen])
        float(loss)
        run.mark()


@kind
def j_micro(run: JaxRun) -> None:
    import jax
    import jax.numpy as jnp

    gradient = jax.jit(jax.grad(run.loss))

    def update(parameters: Any, batches: Any) -> Any:
        total = jax.tree.map(jnp.zeros_like, parameters)
        for x, y in batches:
            total = jax.tree.map(lambda sum_, one: sum_ + one / 4, total, gradient(parameters, x, y))
        return jax.tree.map(lambda weight, change: weight - 0.01 * change, parameters, total)

    step = jax.jit(update) if run.cured else update
    parameters, _ = run.start(*[64] * 10)
    while True:
        parameters = step(parameters, [run.batch() for _ in range(4)])
        jax.block_until_ready(parameters)
        run.mark()


@kind
def j_hash(run: JaxRun) -> None:
    import jax

    step = jax.jit(run.step)
    parameters, state = run.start(256, 256)
    for number in itertools.count(1):
        parameters, state, loss = step(parameters, state, *run.batch())
        if run.due(number, 1, 100):
            weights = b"".join(np.asarray(weight).tobytes() for weight in jax.tree.leaves(parameters))
            hashlib.sha256(weights).hexdigest()
        loss.block_until_ready()
        run.mark()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, metavar="KIND")
    parser.add_argument("port", type=int)
    parser.add_argument("log", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    runs: dict[str, type[Run]] = {"t": TorchRun, "k": KerasRun, "j": JaxRun}
    with options.log.open("a", buffering=1) as log:
        KINDS[options.kind](runs[options.kind[0]](options.port, log))


if __name__ == "__main__":
    main()
