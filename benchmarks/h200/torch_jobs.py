"""PyTorch training jobs for one GPU, each with one known fault, next to the same job fixed; and loops of other makers.

    python benchmarks/h200/torch_jobs.py NAME --log steps.json [--scale 1.0]

A job imports what it needs, prints "imported", and waits for a line; then it makes its model, prints "ready" after
some steps, and trains until SIGTERM or SIGINT. Nothing in it is prepared for a capture. It writes the Unix time at
which the host came to the end of each step: without a synchronization of its own, so the mean over a window is the
step, and a single one is not. ``--scale`` makes the arrays smaller, for a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Job, Loop, Stepped, parser, run_until_signaled, wait_to_begin

Step = Callable[[int], Any]


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _size(scale: float, width: int, multiple: int = 64) -> int:
    return max(multiple, round(width * scale) // multiple * multiple)


def _stepping(step: Step) -> Loop:
    def loop(stepped: Stepped) -> None:
        for number in itertools.count():
            step(number)
            stepped()

    return loop


def _mlp(width: int, layers: int, dtype: Any = None) -> Any:
    import torch
    from torch import nn

    parts: list[Any] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts).to(_device(), dtype or torch.float32)


def _train(model: Any, x: Any, optimizer: Any = None, *, autocast: bool = False, set_to_none: bool = True,
           after: Callable[[int, Any, Any], Any] | None = None) -> Loop:
    """A training loop of one batch that lies on the GPU."""
    import torch

    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast(_device(), torch.bfloat16) if autocast else contextlib.nullcontext():
            out = model(x)
            loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(number, out, loss)

    return _stepping(step)


# -- precision --------------------------------------------------------------------------------------------

def _matrices(scale: float, kind: str) -> Loop:
    import torch

    torch.set_float32_matmul_precision("highest" if kind == "fp32" else "high")
    width, dtype = _size(scale, 4096), torch.float64 if kind == "fp64" else torch.float32
    return _train(_mlp(width, 6, dtype), torch.rand(width, width, device=_device(), dtype=dtype),
                  autocast=kind == "autocast")


def _unaligned(scale: float, *, aligned: bool) -> Loop:
    import torch

    width = _size(scale, 8192) - (not aligned)
    return _train(_mlp(width, 4, torch.bfloat16), torch.rand(width, width, device=_device(), dtype=torch.bfloat16))


# -- the host ---------------------------------------------------------------------------------------------

def _loader(scale: float, workers: int) -> Loop:
    """ResNet-like batches whose samples take 1 ms each to make."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    side = _size(scale, 224, 32)

    class Images(Dataset):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> tuple[Any, int]:
            until = time.perf_counter() + 0.001
            image = torch.empty(3, side, side)
            while time.perf_counter() < until:
                image[0, 0].uniform_()
            return image, index % 10

    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU(),
                          nn.Conv2d(128, 256, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(256, 10)).to(_device())
    loader = DataLoader(Images(), 64, num_workers=workers, pin_memory=_device() == "cuda",
                        persistent_workers=workers > 0)
    optimizer, loss_of = torch.optim.SGD(model.parameters(), 1e-3), nn.CrossEntropyLoss()

    def loop(stepped: Stepped) -> None:
        while True:
            for images, labels in loader:
                images, labels = images.to(_device(), non_blocking=True), labels.to(_device(), non_blocking=True)
                optimizer.zero_grad()
                loss_of(model(images), labels).backward()
                optimizer.step()
                stepped()

    return loop


def _metrics(scale: float, *, on_gpu: bool) -> Loop:
    """A confusion matrix sample by sample with ``.item()``, or in one operation."""
    import torch

    width = _size(scale, 2048)
    labels, total = torch.randint(0, width, (width,), device=_device()), torch.zeros((), device=_device())
    right = 0

    def count(_: int, out: Any, loss: Any) -> None:
        nonlocal right, total
        if on_gpu:
            total = total + (out.argmax(1) == labels).sum()
        else:
            right += sum(out[i].argmax().item() == labels[i].item() for i in range(min(256, width)))

    return _train(_mlp(width, 6, torch.bfloat16), torch.rand(width, width, device=_device(), dtype=torch.bfloat16),
                  after=count)


def _python(scale: float, *, work: bool) -> Loop:
    """The loss is read at each step and 20 ms of Python follow."""
    import torch

    def book(_: int, out: Any, loss: Any) -> None:
        loss.item()
        until = time.perf_counter() + 0.02
        while work and time.perf_counter() < until:
            sum(range(1000))

    width = _size(scale, 4096)
    return _train(_mlp(width, 4, torch.bfloat16), torch.rand(width, width, device=_device(), dtype=torch.bfloat16),
                  after=book)


def _checkpoint(scale: float, every: int) -> Loop:
    import torch

    width = _size(scale, 4096)
    model = _mlp(width, 6, torch.bfloat16)

    def save(number: int, out: Any, loss: Any) -> None:
        if number % every == every - 1:
            torch.save(model.state_dict(), Path(tempfile.gettempdir(), f"{os.getpid()}.pt"))

    return _train(model, torch.rand(width, width, device=_device(), dtype=torch.bfloat16), after=save)


def _evaluation(scale: float) -> Loop:
    """Each tenth step evaluates on 20 batches, with gradients recorded."""
    import torch

    width = _size(scale, 4096)
    model, x = _mlp(width, 4, torch.bfloat16), torch.rand(width, width, device=_device(), dtype=torch.bfloat16)
    return _train(model, x, after=lambda number, out, loss: [float(model(x).float().mean()) for _ in range(20)]
                  if number % 10 == 9 else None)


# -- launches, kernels, memory ----------------------------------------------------------------------------

def _launches(scale: float, *, graph: bool) -> Loop:
    """60 layers of 256 on a batch of 32: the GPU waits for its launches; or the step is one CUDA graph."""
    import torch

    model, x = _mlp(256, 60), torch.rand(32, 256, device=_device())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(_: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    if not graph or _device() == "cpu":
        return _stepping(step)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(3):
            step(number)
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step(0)

    def replay(_: int) -> None:
        recorded.replay()
        torch.cuda.synchronize()

    return _stepping(replay)


def _optimizer(scale: float, *, fused: bool) -> Loop:
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(150))).to(_device())
    optimizer = torch.optim.Adam(model.parameters(), 1e-5, fused=True) if fused else torch.optim.Adam(
        model.parameters(), 1e-5, foreach=False)
    return _train(model, torch.rand(_size(scale, 4096), 512, device=_device()), optimizer)


def _elementwise(scale: float, *, compiled: bool) -> Loop:
    """A chain of elementwise operations on one array of 512 MB."""
    import torch
    from torch import nn

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.rand(8192)) for _ in range(4)])

        def forward(self, x: Any) -> Any:
            for weight in self.weights:
                x = x * weight + 0.5
                x = 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))
            return x

    model = Chain().to(_device())
    return _train(torch.compile(model) if compiled else model, torch.rand(_size(scale, 16384), 8192, device=_device()))


def _copies(scale: float, *, pinned: bool) -> Loop:
    """Eight batches in the host's memory, 256 MB each, one copied to the GPU at each step."""
    import torch

    rows, cuda = _size(scale, 16384), _device() == "cuda"
    batches = [torch.rand(rows, 4096) for _ in range(8)]
    if pinned and cuda:
        batches = [batch.pin_memory() for batch in batches]
    model = _mlp(4096, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.set_float32_matmul_precision("high")
    ahead = torch.cuda.Stream() if pinned and cuda else None

    def upload(number: int) -> Any:
        return batches[number % 8].to(_device(), non_blocking=pinned)

    following: list[Any] = [upload(0)]

    def step(number: int) -> None:
        if ahead is None:
            x = upload(number)
        else:
            torch.cuda.current_stream().wait_stream(ahead)
            x = following[0]
            x.record_stream(torch.cuda.current_stream())
            with torch.cuda.stream(ahead):
                following[0] = upload(number + 1)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return _stepping(step)


def _attention(scale: float, *, fused: bool) -> Loop:
    import torch
    from torch import nn

    length, heads = _size(scale, 4096), 16

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, heads, 64).permute(2, 0, 3, 1, 4)
            if fused:
                y = nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                y = (q @ k.transpose(-2, -1) / 8).softmax(-1) @ v
            return x + self.out(y.transpose(1, 2).reshape(x.shape))

    model = nn.Sequential(*(Attention() for _ in range(4))).to(_device(), torch.bfloat16)
    return _train(model, torch.rand(4, length, 1024, device=_device(), dtype=torch.bfloat16))


def _resnet(scale: float, *, channels_last: bool) -> Loop:
    """timm's ResNet-50 under autocast."""
    import timm
    import torch

    form = torch.channels_last if channels_last else torch.contiguous_format
    model = timm.create_model("resnet50", num_classes=10).to(_device(), memory_format=form)
    x = torch.rand(_size(scale, 128, 4), 3, 224, 224, device=_device()).to(memory_format=form)
    return _train(model, x, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9), autocast=True)


def _allocator(scale: float, *, emptied: bool) -> Loop:
    import torch

    width = _size(scale, 4096)
    return _train(_mlp(width, 6, torch.bfloat16), torch.rand(width, width, device=_device(), dtype=torch.bfloat16),
                  after=lambda *_: torch.cuda.empty_cache() if emptied else None)


def _lstm(scale: float) -> Loop:
    """A batch of 8 through 512 time steps: small kernels that leave most of the GPU empty."""
    import torch
    from torch import nn

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(512, 512, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(x)[0]

    return _train(Last().to(_device()), torch.rand(8, _size(scale, 512, 8), 512, device=_device()))


def _embedding(scale: float, *, sparse: bool) -> Loop:
    import torch
    from torch import nn

    table = nn.Embedding(_size(scale, 8_000_000), 64, sparse=sparse).to(_device())
    ids = torch.randint(0, table.num_embeddings, (8192,), device=_device())
    return _train(nn.Sequential(table, nn.Linear(64, 64).to(_device())), ids,
                  torch.optim.SGD(itertools.chain(table.parameters()), 1e-3))


def _zeroed(scale: float, *, set_to_none: bool) -> Loop:
    """Parameters of 2 GB and a small batch."""
    import torch

    width = _size(scale, 8192)
    return _train(_mlp(width, 8), torch.rand(64, width, device=_device()), set_to_none=set_to_none)


# -- loops of other makers --------------------------------------------------------------------------------

def _gpt(scale: float, *, compiled: bool = False) -> Loop:
    """A GPT-like model as its makers train it: bf16, fused attention, fused AdamW."""
    import torch
    from torch import nn

    width = _size(scale, 2048, 128)
    layer = nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    model: Any = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(_device(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    x = torch.rand(8, _size(scale, 1024), width, device=_device(), dtype=torch.bfloat16)
    return _train(torch.compile(model) if compiled else model, x, optimizer)


def _gpt2_config(scale: float, **more: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_layer=max(2, round(12 * scale)), n_embd=_size(scale, 768), n_head=_size(scale, 768) // 64,
                      n_positions=1024, **more)


def _hf_trainer(scale: float, *, fused: bool = True) -> Loop:
    """transformers' Trainer: GPT-2 small on random tokens, bf16."""
    import torch
    from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    length = _size(scale, 512)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50257, (2048, length))]

    def loop(stepped: Stepped) -> None:
        class Log(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                stepped()

        arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=16, bf16=_device() == "cuda",
                                      max_steps=1_000_000, save_strategy="no", report_to=[], disable_tqdm=True,
                                      logging_steps=20, optim="adamw_torch_fused" if fused else "adamw_torch")
        Trainer(GPT2LMHeadModel(_gpt2_config(scale)), arguments, train_dataset=rows, callbacks=[Log()]).train()

    return loop


def _hf_generate(scale: float) -> Loop:
    """transformers' generate(): 64 tokens for eight prompts."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(_gpt2_config(scale)).eval().to(_device(), torch.bfloat16)
    prompts = torch.randint(0, 50257, (8, 128), device=_device())
    return _stepping(lambda _: model.generate(prompts, max_new_tokens=64, min_new_tokens=64, do_sample=True,
                                              attention_mask=torch.ones_like(prompts), pad_token_id=50256))


def _lightning(scale: float) -> Loop:
    """lightning's Trainer: a classifier, its metrics logged at each step, a DataLoader without workers."""
    import lightning
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    width = _size(scale, 1024)

    def loop(stepped: Stepped) -> None:
        class Classifier(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                         nn.Linear(width, 10))

            def training_step(self, batch: Any, number: int) -> Any:
                x, y = batch
                out = self.net(x)
                loss = nn.functional.cross_entropy(out, y)
                self.log("loss", loss)
                self.log("accuracy", (out.argmax(1) == y).float().mean())
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), 1e-4)

            def on_train_batch_end(self, *_: Any) -> None:
                stepped()

        data = TensorDataset(torch.rand(20_000, width), torch.randint(0, 10, (20_000,)))
        trainer = lightning.Trainer(max_epochs=-1, logger=False, enable_checkpointing=False, accelerator="auto",
                                    enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Classifier(), DataLoader(data, 256, shuffle=True))

    return loop


def _graph_network(scale: float) -> Loop:
    """PyTorch Geometric: GCN on a random graph, the whole of it at each step."""
    import torch
    from torch import nn
    from torch_geometric.nn import GCNConv

    nodes = _size(scale, 200_000)
    x, edges = torch.rand(nodes, 128, device=_device()), torch.randint(0, nodes, (2, 20 * nodes), device=_device())

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = GCNConv(128, 256), GCNConv(256, 16)

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x, edges).relu(), edges)

    model = Network().to(_device())
    return _train(model, x, torch.optim.Adam(model.parameters(), 1e-3))


JOBS = {
    "gpt": Job(_gpt),
    "fp32": Job(lambda s: _matrices(s, "fp32"), "tensor_cores_unused", "tf32"),
    "tf32": Job(lambda s: _matrices(s, "tf32"), "sixteen_bit_unused", "autocast"),
    "autocast": Job(lambda s: _matrices(s, "autocast")),
    "loader": Job(lambda s: _loader(s, 0), "input_bound", "workers"),
    "workers": Job(lambda s: _loader(s, 12)),
    "metrics": Job(lambda s: _metrics(s, on_gpu=False), "step_gap_host", "metrics_on_gpu"),
    "metrics_on_gpu": Job(lambda s: _metrics(s, on_gpu=True)),
    "launches": Job(lambda s: _launches(s, graph=False), "launch_bound", "cuda_graph"),
    "cuda_graph": Job(lambda s: _launches(s, graph=True)),
    "pageable": Job(lambda s: _copies(s, pinned=False), "copies_pageable", "pinned"),
    "pinned": Job(lambda s: _copies(s, pinned=True)),
    "attention": Job(lambda s: _attention(s, fused=False), "attention_unfused", "flash"),
    "flash": Job(lambda s: _attention(s, fused=True)),
    "resnet_nchw": Job(lambda s: _resnet(s, channels_last=False), "layout_conversions", "resnet_nhwc"),
    "resnet_nhwc": Job(lambda s: _resnet(s, channels_last=True)),
    "hf_trainer": Job(_hf_trainer),
    "hf_generate": Job(_hf_generate, "launch_bound"),
    "lightning": Job(_lightning, "input_bound"),
    "loop_adam": Job(lambda s: _optimizer(s, fused=False), "optimizer_unfused", "fused_adam"),
    "fused_adam": Job(lambda s: _optimizer(s, fused=True)),
    "elementwise": Job(lambda s: _elementwise(s, compiled=False), "elementwise_unfused", "compiled"),
    "compiled": Job(lambda s: _elementwise(s, compiled=True)),
    "unaligned": Job(lambda s: _unaligned(s, aligned=False), "dims_unaligned", "aligned"),
    "aligned": Job(lambda s: _unaligned(s, aligned=True)),
    "python": Job(lambda s: _python(s, work=True), "step_gap_host", "no_python"),
    "no_python": Job(lambda s: _python(s, work=False)),
    "empty_cache": Job(lambda s: _allocator(s, emptied=True), "allocation_in_steps", "kept_cache"),
    "kept_cache": Job(lambda s: _allocator(s, emptied=False)),
    "fp64": Job(lambda s: _matrices(s, "fp64"), "double_precision", "fp32"),
    "embedding": Job(lambda s: _embedding(s, sparse=False), "embedding_dense", "sparse"),
    "sparse": Job(lambda s: _embedding(s, sparse=True)),
    "zeroed": Job(lambda s: _zeroed(s, set_to_none=False), "gradients_zeroed", "none_gradients"),
    "none_gradients": Job(lambda s: _zeroed(s, set_to_none=True)),
    "evaluation": Job(_evaluation, "evaluation_share"),
    "checkpoint": Job(lambda s: _checkpoint(s, 20), "time_outside_steps", "rare_checkpoint"),
    "rare_checkpoint": Job(lambda s: _checkpoint(s, 2000)),
    "lstm": Job(_lstm, "small_grids"),
    "graph_network": Job(_graph_network),
    "gpt_compiled": Job(lambda s: _gpt(s, compiled=True)),
}
IMPORTS = {"resnet_nchw": "timm", "resnet_nhwc": "timm", "hf_trainer": "transformers", "hf_generate": "transformers",
           "lightning": "lightning", "graph_network": "torch_geometric.nn"}


def main() -> None:
    options = parser(JOBS, __doc__).parse_args()

    import torch

    if options.job in IMPORTS:
        importlib.import_module(IMPORTS[options.job])
    wait_to_begin()
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    run_until_signaled(JOBS[options.job].make(options.scale), options.log, {
        "job": options.job, "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__})


if __name__ == "__main__":
    main()
