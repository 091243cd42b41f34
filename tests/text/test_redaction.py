"""What must be hidden, and what must not."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.samples import HostProcess
from gputop.text import redaction
from tests.fakes import node_sample

_HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(("text", "hidden"), [
    ("train.py --token=abc123xyz", "train.py --token=***"),
    ("train.py --token abc123xyz --lr 0.1", "train.py --token *** --lr 0.1"),
    ("train.py --hf_token hf_abc", "train.py --hf_token ***"),
    ("train.py --password hunter2 -v", "train.py --password *** -v"),
    ("train.py --password=123456", "train.py --password=***"),
    ("train.py --password=a,b&c;d x", "train.py --password=*** x"),
    ("train.py --api-key k --steps 5", "train.py --api-key *** --steps 5"),
    ("train.py --apiKey=k", "train.py --apiKey=***"),
    ("train.py --accessToken=kkk", "train.py --accessToken=***"),
    ("train.py -password x", "train.py -password ***"),
    ("WANDB_API_KEY=123 python t.py", "WANDB_API_KEY=*** python t.py"),
    ("env HF_TOKEN=x AWS_SECRET_ACCESS_KEY=a/b+c python", "env HF_TOKEN=*** AWS_SECRET_ACCESS_KEY=*** python"),
    ("wandb.api_key=abc lr=1", "wandb.api_key=*** lr=1"),
    ("--cfg={'password':'p w','lr':1}", "--cfg={'password':'***','lr':1}"),
    ('--cfg={"db_password": "p w", "lr": 1}', '--cfg={"db_password": "***", "lr": 1}'),
    ("--set a=1,db.password=abc,lr=0.1", "--set a=1,db.password=***,lr=0.1"),
    ("python -c api_key='a b'; run()", "python -c api_key='***'; run()"),
    ("--db postgres://ana:s3cr@t@db:5432/x", "--db postgres://ana:***@db:5432/x"),
    ("--db redis://:pw@h", "--db redis://:***@h"),
    (f"git clone https://a1b2c3d4e5f6a7b8c9d0{_HEX}@host/x", "git clone https://***@host/x"),
    ("--url https://h/x?token=abc&n=1", "--url https://h/x?token=***&n=1"),
    ("https://b.blob/x?sv=2022&sig=a1B2c3D4e5F6a7B8c9D0%3D", "https://b.blob/x?sv=2022&sig=***"),
    ("run hf_ABCDEFGHIJKLMNOPQRSTUV end", "run *** end"),
    ("run AKIAIOSFODNN7EXAMPLE end", "run *** end"),
    ("run ghp_0123456789012345678901234567890123 end", "run *** end"),
    ("run sk-proj-abcdefghij0123456789abcd end", "run *** end"),
    ("run nvapi-abcdefghij0123456789abcd end", "run *** end"),
    ("run eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSM end", "run *** end"),
    ("-H Authorization: Bearer abc.def-123456 x", "-H Authorization: *** x"),
    ("-H Authorization: Basic dXNlcjpw", "-H Authorization: ***"),
    (f"wandb login {_HEX}", "wandb login ***"),
    ("--key a1B2c3D4e5F6a7B8c9D0 --n 1", "--key *** --n 1"),
    ("x -----BEGIN RSA PRIVATE KEY----- MIIE abc -----END RSA PRIVATE KEY----- y", "x *** y"),
    ("--db_pass geheim", "--db_pass ***"),
    ("--client-secret=x", "--client-secret=***"),
    ("--auth_tokens abc", "--auth_tokens ***"),
    ('--password="open end', '--password="***'),
    ("MY_PASSWORD : x", "MY_PASSWORD : ***"),
])
def test_a_secret_is_hidden_and_its_name_stays(text: str, hidden: str) -> None:
    assert redaction.command(text) == hidden
    assert redaction.command(hidden) == hidden, "what is redacted stays as it is"


@pytest.mark.parametrize("text", [
    "python train.py --learning_rate 0.1 --key_dim 64 --tokenizer=bert --batch 256",
    "--max_tokens 2048 --tokens_per_batch=4096 --num-tokens 5 --pad_token <pad> --eos_token=</s> --token_dim 64",
    "--tokenizer_path /data/tok.model --token_type_ids x --secretary ana --passes 3 --num_keys 8 --keys image,label",
    "--key features/image --sort_key name --cache_key=epoch7 --author ana --authority local",
    "--token=5 --use_auth_token True --token $HF_TOKEN --password --verbose --api-key= --token",
    "--password-stdin --token_file /run/secret --password_file=/x --private_key_file=/home/a/.ssh/id",
    "--commit " + _HEX + " --run-id a1b2c3d4e5f6a7b8c9d0",
    "s3://bucket/key=1/x gs://b/o ssh://git@host/repo http://localhost:8080/a@b tcp://10.0.0.1:5555",
    "PWD=/home/ana OLDPWD=/tmp CUDA_VISIBLE_DEVICES=0,1 PATH=/bin:/usr/bin",
    "--data:path=x a:b c::d --session train --license mit --login ana --pass 2",
    "python -m torch.distributed.run --rdzv_id=job1234 --rdzv_endpoint=node-07:29400",
    "[kworker/0:1]", "", "   ", "=", "--", "-=-", ":", "password", "token:",
])
def test_ordinary_arguments_stay(text: str) -> None:
    assert redaction.command(text) == text


@given(st.text(max_size=60), st.text(string.ascii_letters + string.digits + "!#%^*_+/=.~-", min_size=8, max_size=40))
def test_whatever_stands_around_it_a_named_secret_is_gone(before: str, secret: str) -> None:
    secret = "s" + secret
    for form in (f"--password={secret}", f"--password '{secret}'", f"API_TOKEN={secret}", f'"api_key": "{secret}"'):
        assert secret not in redaction.command(f"{before} {form}")


def test_a_sample_keeps_all_but_the_secrets_of_its_commands() -> None:
    sample = node_sample(0)
    assert redaction.sample(sample) is sample
    process = replace(sample.processes[0], command="python t.py --token abcdef")
    hidden = redaction.sample(replace(sample, processes=(process, replace(process, command=None))))
    assert [p.command for p in hidden.processes] == ["python t.py --token ***", None]
    assert replace(hidden, processes=sample.processes) == sample
    top = HostProcess(7, "ana", "sync --token abcdef", process.cpu_cores, process.rss_bytes)
    host = replace(sample.host, top_processes=(top, replace(top, command=None)))
    shown = redaction.sample(replace(sample, host=host)).host.top_processes
    assert [p.command for p in shown] == ["sync --token ***", None]
