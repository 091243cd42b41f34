"""Known kinds of host work, by the names of its events."""

from __future__ import annotations

import re

_ITERATOR = r"MakeIterator\b|AnonymousIterator|Anonymous\w*Iterator|\w*Dataset\w*$"
_FREEING = r"TFE_DeleteTensorHandle$|Delete\w*Iterator|DestroyResource\w*$"
# The first that fits a name counts. Ids are those of HOST_KINDS in gputop.render.step_parts.
WORK_KINDS: tuple[tuple[str, str], ...] = (
    ("profiler", r"(?:\S*/)?profiler(?:_v2)?\.py:\d+ (?:start|stop)|ProfilerSession::|(?:start|stop)_trace$"),
    ("checkpoint", r"(?:SaveV2|SaveSlices|ShardedFilename|MergeV2Checkpoints|WriteFile|SaveDataset\w*)$|"
                   r"\w*[Cc]heckpoint|serialization\.py:\d+ |write_record\b"),
    ("summary", r"\w*Summary\w*$|\w*SummaryWriter\w*$"),
    ("iterator", _ITERATOR),
    ("freeing", _FREEING),
    # What is compiled already runs under such names, too: Torch-Compiled Region, CompiledFunction.
    ("compilation",
     r"tf\.function-graph_building|backend_compile|.*(?:Compile(?!d)|Compiler::|\(dynamo_timed\)$)"),
    # Of a dataset that is made anew: its functions are traced, too.
    ("datasets", rf"{_ITERATOR}|{_FREEING}|tf\.function-graph_building"),
    ("session", "SessionRun$"),
    ("garbage", r"(?:Python )?(?:gc|GC)\b|[Gg]arbage"),
    ("files", r".*(?:ReadFile|WriteFile|OpenFile|posix_fs|FileSystem)"),
)
PATTERN_OF_KIND = dict(WORK_KINDS)
# Functions of Keras and of users that evaluate and predict.
EVALUATES = re.compile(r"(?:run_)?(?:eval|evaluate|evaluation|validate|validation)(?:_(?:step|epoch|loop|model))?")
PREDICTS = re.compile(r"predict(?:_on_batch|_generator|_step)?")
# Function of TensorFlow's in which a loop over a tf.data dataset waits for its next batch.
WAITS = re.compile(r"iterator_get_next(?:_sync)?")
# What a loop over a tf.data dataset calls for each batch: at its end it calls nothing and drops the iterator.
NEXT_BATCH = re.compile(r"iterator_ops\.py \S*\b__next__$")
# Python's line in Keras' own loops, where nothing is recorded: the loop drops an epoch's iterator there.
FREES_ITERATOR = re.compile(r"keras/\S*(?:trainer|engine/training)\.py \S* ?\S*\b(?:fit|evaluate|predict)$")
# File and function in which JAX waits for XLA, and in which torch.compile works: of a call that the recording ends in
# no event tells.
COMPILES = re.compile(r"compiler\.py \S* ?\S*\b(?:backend_compile\w*|compile_or_get_cached)$|"
                      r"torch/(?:_inductor/\S+|_dynamo/convert_frame)\.py \S* ?\S*compile\w*$")
# File and function of a library that saves a checkpoint, as torch.save, Lightning's ModelCheckpoint, Trainer's
# _save_checkpoint, Flax's to_bytes. Activation checkpointing saves nothing to a file.
SAVES_CHECKPOINT = re.compile(
    r"(?!.*utils/checkpoint\.py)(?=.*(?:[Cc]heckpoint|serialization\.py|pretrained|saving|safetensors))"
    r".* \S*(?:save|dump|to_bytes)")
READ_VARIABLE = "ReadVariableOp"
# So many variables a model that is saved reads, and TensorBoard's histograms write; a metric or two are fewer. gputop's
# own figure.
MANY_VARIABLES = 8
