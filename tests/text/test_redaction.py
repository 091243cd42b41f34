"""What must be hidden, and what must not."""

from __future__ import annotations

import re
import string
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gputop.core.samples import HostProcess
from gputop.text import redaction
from tests.fakes import node_sample
from tests.records import replace

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


# Each form holds SECRET where the secret stands; what is made of it may not.
_FORMS = re.split(r"\n|(?<! )\|(?! )", """
curl -u ana:{} https://h/x|curl -uana:{} https://h|curl -fsSLu ana:{} h|curl --user ana:{} h|curl --user=ana:{} h
curl -u {}: https://api.stripe.com|curl -U p:{} -x proxy h|curl --proxy-user p:{} h|bash -c curl -u 'ana:{}' h
curl -b session={} h|curl --cookie sid={} h|curl -E cert.pem:{} h|curl -H Cookie:sid={} h|curl -H X-Api-Key:{} h
curl -H PRIVATE-TOKEN: {} h|curl -H Authorization: token {} h|/usr/bin/curl -s -u ana:{} h
wget --user=ana --password={} h|wget --http-password {} h|http -a ana:{} h|https --auth ana:{} h
t.py --pass {}|t.py --pass={}|t.py --pwd {}|t.py --pwd={}|t.py --pw {}|t.py --pw={}|t.py --passwd {}|t.py -pwd {}
t.py --db-pass {}|t.py --dbPwd={}|PASS={} t.py|DB_PWD={} t.py|PGPASSWORD={} psql|MYSQL_PWD={} mysql|PGPASS={} x
sshpass -p {} ssh -p 22 h|sshpass -p{} ssh h|sshpass -v -p {} scp a b|SSHPASS={} sshpass -e ssh h
mysql -u root -p{} db|mysql -uroot -p{}|mysqldump --password={} db|mariadb -p{} db|mysqladmin -p{} ping
redis-cli -h h -a {} ping|redis-cli --pass {} ping|redis-cli -a{} ping|redis-server --requirepass {}
mongo -u a -p {} h|mongosh -u a -p {}|mongodump --password {}|ldapsearch -D cn=a -w {}|sqlcmd -S h -U sa -P {}
docker login -u ana -p {} reg|podman login --password {} reg|helm registry login -u a -p {} h|az login -u a -p {}
skopeo copy --src-creds a:{} docker://a|skopeo copy --dest-creds=a:{} x y|oc login -u a -p {}|twine upload -u a -p {} x
ipmitool -H h -U a -P {} power|unzip -P {} a.zip|7z x -p{} a.7z|smbclient //h/s -U ana%{}|xfreerdp /u:a /p:{} /v:h
openssl enc -aes-256-cbc -k {} -in a|openssl rsa -passin pass:{} -in k|openssl enc -pass pass:{}|snmpwalk -v2c -c {} h
mosquitto_pub -h h -P {} -t x|lftp -u ana,{} h|ncftpput -u a -p {} h|htpasswd -cb f ana {}|gpg --passphrase {} -d x
echo {} | docker login --password-stdin|echo {} | sudo -S reboot|echo ana:{} | chpasswd
vault login {}|ngrok authtoken {}|ngrok config add-authtoken {}|snyk auth {}
aws configure set aws_secret_access_key {}|git config --global github.token {}|npm config set //r/:_authToken {}
csh -c setenv WANDB_API_KEY {}|export HF_TOKEN={}|env X_SECRET={} x|set -x; API_KEY={} python t.py
git clone https://{}@github.com/a/b|git clone https://ana:{}@github.com/a/b|git clone https://oauth2:{}@gitlab.com/a
pip install --index-url https://__token__:{}@pypi.x/simple|pip install git+https://{}@github.com/a/b
--db postgres://ana:{}@db/x|--db mysql+pymysql://ana:{}@db:3306/x|amqp://a:{}@mq:5672/%2f|redis://default:{}@r:6379/0
mongodb+srv://a:{}@c.net/x|--proxy http://u:{}@proxy:3128|ftp://a:{}@h/f|--db a:{}@tcp(db:3306)/x|--url //a:{}@h/x
postgres://a:x/{}/y@db/x|https://a:{}?@h/x|--sentry https://{}@o1.ingest.sentry.io/5
https://hooks.slack.com/services/T00/B00/{}|https://hooks.slack.com/workflows/T0/A0/1/{}
https://discord.com/api/webhooks/123/{}|https://x.webhook.office.com/webhookb2/a@b/IncomingWebhook/{}/c
https://api.telegram.org/bot{}/sendMessage|https://hooks.zapier.com/hooks/catch/1/{}/
https://h/x?access_token={}&n=1|https://h/x?n=1&api_key={}|https://h/x?password={}
python -c import os; os.environ['X_TOKEN']='{}'; run()|python -c import os; os.environ["HF_TOKEN"] = "{}"
python -c os.environ.setdefault('WANDB_API_KEY', '{}')|python -c os.putenv("API_KEY","{}")
python -c login(token='{}')|python -c api_key = '{}'|python -c api_key= '{}'|python -c c = {{'password': '{}'}}
bash -c python -c \\"os.environ[\\'X_TOKEN\\']=\\'{}\\'\\"|--cfg {{\\"token\\": \\"{}\\"}}|["--token", "{}"]
psql -c ALTER USER a PASSWORD '{}'|mysql -e CREATE USER a IDENTIFIED BY '{}'
DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=x|Endpoint=sb://h/;SharedAccessKey={}
Server=h;User Id=a;Password={};|Server=h;Uid=a;Pwd={};|--hparams lr=1,api_key={},b=2|+wandb.api_key={} lr=1
-H Authorization: Bearer {}|-H Authorization:Basic {}|--header=Authorization: Bearer {}|grpcurl -H authorization: bearer {} h
--access-key {}|--secret-key={}|--aws_secret_access_key {}|--client_secret {}|--private-key={}|--auth-token {}
--wandb-key {}|--openai-key={}|--token={}|--credentials={}|--creds a:{}|--jwt-secret {}|--encryption-key {}
--ServerApp.token={}|--NotebookApp.password='{}'|ray start --redis-password={}|--Passwort {}|--keypass {}|--storepass {}
""".strip())


@pytest.mark.parametrize("form", _FORMS)
def test_each_known_way_to_give_a_secret_is_hidden(form: str) -> None:
    for secret in ("hunter2x", "Tr0ub4dor&3", "correcthorse", "a1B2c3D4e5F6a7B8c9D0"):
        text = form.format(secret)
        hidden = redaction.command(text)
        assert secret not in hidden and redaction.HIDDEN in hidden, hidden
        assert secret[2:] not in hidden.replace(redaction.HIDDEN, ""), "nor its end"
        assert hidden.split()[0].partition("=")[0] == text.split()[0].partition("=")[0] or "://" in form, "it is named"
        assert redaction.command(hidden) == hidden


# ruff: noqa: E501, SIM905
_A, _1, _H = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", "0123456789", _HEX
# Formats as their issuers, detect-secrets and gitleaks publish them; made of the alphabet, none was ever valid.
_TOKENS = (
    "AKIAABCDEFGHIJKLMNOP", "ASIAABCDEFGHIJKLMNOP", "ABIAABCDEFGHIJKLMNOP", "A3TXABCDEFGHIJKLMNOP",
    "ghp_" + _A, "gho_" + _A, "ghu_" + _A, "ghs_" + _A, "ghr_" + _A, "github_pat_" + _A + _1 + _A,
    "glpat-" + _A[:20], "gldt-" + _A[:20], "glrt-" + _A[:20], "glptt-" + _H, "GR1348941" + _A[:20],
    "hf_" + _A[:34], "api_org_" + _A[:34], "sk-" + _A, "sk-proj-" + _A, "sk-ant-api03-" + _A + _A, "nvapi-" + _A + _A,
    "xoxb-123456789012-" + _A[:24], "xoxp-1-2-3-" + _H[:32], "xapp-1-A0-1-" + _H, "xoxe.xoxp-1-" + _A,
    "AIza" + _A[:35], "ya29." + _A, "GOCSPX-" + _A[:28], "npm_" + _A, "pypi-AgEIcHlwaS5vcmc" + _A + _A,
    "sk_live_" + _A[:24], "rk_live_" + _A[:24], "sk_test_" + _A[:24], "whsec_" + _A[:32],
    "AC" + _H[:32], "SK" + _H[:32], "SG." + _A[:22] + "." + _A + _A[:7], _H[:32] + "-us12", "key-" + _H[:32],
    "sq0csp-" + _A + _A[:7], "sq0atp-" + _A[:22], "EAAA" + _A + _A[:24], "110201543:" + "AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw1",
    "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.ZnCjm1XVW7vRze4b7Cq4se7kKWs", "AKCp5" + _A[:20] + "12", "dapi" + _H[:32],
    "dop_v1_" + _H + _H[:24], "hvs." + _A, "dckr_pat_" + _A[:27], "lin_api_" + _A, "ntn_" + _A, "PMAK-" + _H,
    "glc_" + _A, "glsa_" + _A, "NRAK-ABCDEFGHIJKLMNOPQRSTUVW0123", "sntrys_" + _A, "shpat_" + _H[:32], "r8_" + _A,
    "gsk_" + _A, "xai-" + _A, "pplx-" + _A, "tskey-auth-" + _A, "sbp_" + _H, "abc8Q~" + _A[:34], "rubygems_" + _H + _H[:8],
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-DEF_123", "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.",
    "-----BEGIN PRIVATE KEY----- MIIEvQ -----END PRIVATE KEY-----", "-----BEGIN OPENSSH PRIVATE KEY----- b3Blbn",
    "-----BEGIN PGP PRIVATE KEY BLOCK----- lQOYB -----END PGP PRIVATE KEY BLOCK-----",
)


@pytest.mark.parametrize("token", _TOKENS, ids=[token[:12] for token in _TOKENS])
def test_a_token_is_hidden_wherever_it_stands(token: str) -> None:
    for around in ("run {} end", "x={}", "f('{}')", '{{"x": "{}"}}', "https://h/?x={}", "-H X:{}", "{}"):
        hidden = redaction.command(around.format(token))
        assert token not in hidden and token[-6:] not in hidden.replace("end", ""), hidden


# Detectors whose patterns are a form of the secret itself. Left out: entropy and public addresses, which find what is
# no secret, and keywords, whose texts follow below.
_DETECTORS = ("ArtifactoryDetector AWSKeyDetector AzureStorageKeyDetector BasicAuthDetector DiscordBotTokenDetector "
              "GitHubTokenDetector GitLabTokenDetector MailchimpDetector NpmDetector OpenAIDetector PypiTokenDetector "
              "SendGridDetector SlackDetector SquareOAuthDetector StripeDetector TelegramBotTokenDetector "
              "TwilioKeyDetector").split()
_NAMED_KEYS = tuple(
    form.format(name=name, value=value)
    for form in ("{name}={value}", "{name}: {value}", "{name} := {value}", '{name} => "{value}"', "{name}::{value}",
                 '"{name}"  :  "{value}"', "x['{name}'] = '{value}'", "--{name} {value}", "--{name}={value}")
    for name, value in (
        *((name, _HEX[:8] * 8) for name in ("cloudant_password", "cloudant_api_key", "cl_pwd", "clApiKey")),
        *((name, _A + _A[:8]) for name in ("ibm_cloud_iam_api_key", "ibm-cloud-password", "ibmcloudApiToken")),
        *((name, _HEX[:8] * 6) for name in ("cos_secretkey", "ibm_cos_hmac_secret_access_key", "cos-secret-key")),
        *((name, _HEX[:8] * 8) for name in ("softlayer_password", "sl_api_key", "softlayer-key-token")),
        ("aws_secret_access_key", _A + "0+/w"), ("awskey", _A + "0+/w"), ("aws_pw", _A + "0+/w")))
_OTHERS = (
    *(f"-----BEGIN {kind}PRIVATE KEY----- MIIEvQ" for kind in ("", "RSA ", "EC ", "DSA ", "OPENSSH ")),
    "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ---- P2/56", "PuTTY-User-Key-File-2: ssh-rsa Private-Lines: 8 AAAA",
    "https://api.softlayer.com/soap/v3/" + _HEX[:8] * 8, "https://ana:" + _HEX[:8] * 8 + "@ana.cloudant.com",
    "https://HOOKS.Slack.com/services/T00000/B00000/" + _A, "-c 'aws key is \"" + _A + "0+/w\"'",
    "//registry.x.org/:_authToken=  12345678-1234-1234-1234-123456789012",
)


@cache
def _detector(name: str) -> Any:
    """A detector of detect-secrets; skips where that is not installed."""
    return pytest.importorskip("detect_secrets.core.plugins.initialize").from_plugin_classname(name)


def test_what_detect_secrets_finds_is_gone_after_it() -> None:
    """Of a program that looks for secrets, every detector of named and formed ones finds some before, and none after."""
    names = [*_DETECTORS, "CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "JwtTokenDetector",
             "KeywordDetector", "PrivateKeyDetector", "SoftlayerDetector"]
    texts = [f"run x={token} end" for token in _TOKENS] + [form.format("a1B2c3D4e5F6a7B8c9D0") for form in _FORMS]
    texts += [f"run {text} end" for text in (*_NAMED_KEYS, *_OTHERS)]
    for name in names:
        detector = _detector(name)
        left = [hidden for text in texts if any(detector.analyze_string(hidden := redaction.command(text)))]
        assert not left, (name, left)
        if name not in _DETECTORS:  # strings for those are made of their own patterns, below
            assert any(any(detector.analyze_string(text)) for text in texts), name


@pytest.mark.parametrize("name", _DETECTORS)
@given(st.data())
@settings(max_examples=16)
def test_strings_made_of_the_patterns_of_detect_secrets_are_hidden(name: str, data: st.DataObject) -> None:
    detector = _detector(name)
    pattern = data.draw(st.sampled_from(list(detector.denylist)))
    secret = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=st.characters(min_codepoint=33, max_codepoint=126)))
    text = f"run {'https' if name == 'BasicAuthDetector' else ''}{secret} end"
    # A variable of the shell; a quote in an address; npm's own form has a length; AP and letters alone are a word.
    assume("$" not in text and "npm_" not in text and not re.search(r"\bAP[A-F][A-Za-z]+\b|https.*[\"']", text))
    assert not any(detector.analyze_string(redaction.command(text))), redaction.command(text)


@pytest.mark.parametrize("text", [
    "curl -s -o out.json https://h/x -u ana", "curl --unix-socket /run/x http://h/a", "curl -L https://h:8080/a@b",
    "mysql -u root -P 3306 -p db", "mysqldump --port=3306 db", "sshpass -f /run/pw ssh -p 22 h", "ssh -p 2222 node7",
    "docker run -p 8080:80 -u 1000:1000 img", "docker run --rm -v /a:/b nvcr.io/nvidia/tensorflow:24.01-tf2-py3 python t.py",
    "redis-cli -h h -p 6379 ping", "mkdir -p /data/x; tar -a -cf x.tar y", "unzip -o a.zip -d b", "openssl version -a",
    "torchrun --nproc_per_node=8 --master_addr 10.0.0.1 --master_port 29500 train.py --pass 2",
    "python -m torch.distributed.launch --nnodes=2 --node_rank=0 train.py --ckpt /data/run-1/step_1000.ckpt",
    "python -c import os; os.environ['CUDA_VISIBLE_DEVICES']='0,1'; os.environ[\"TF_CONFIG\"] = \"{}\"; run()",
    "--pwd /home/ana/work --workdir=/data --passes 3 --bypass true --compass north --pass-through x",
    "git clone https://github.com/a/b && git clone git@github.com:a/b ssh://ana@host/x https://git@host/x",
    "--image repo/img@sha256:" + _HEX, "-v /a:/b@c --at user@host:/path scp a user@host:/b rsync -a x ana@h:/y",
    "--endpoint http://10.0.0.1:8080/v1/@x --hosts http://a:1,http://b:2/x@y", "grpc://10.0.0.7:8470 tcp://[::1]:1",
    "basic training with bearer bonds; Basic usage", "echo done | tee log", "echo a | grep -c a",
    "--sk-learn x --hf_home /data/hf_cache --npm_config x --key-points 17 --pypi-mirror m --AC on --SKU 12",
    "mpirun -np 8 -H a:4,b:4 -x NCCL_DEBUG=INFO -x PATH python t.py", "srun --ntasks=8 -A proj -p gpu python t.py",
    "python train.py experiment=a/b +trainer.precision=16 model.cookie_cutter=x data.path=/a/b",
    "s3://bucket/run-2024-01-01T00:00:00 gs://b/AP1/x hdfs://nn:9000/user@x/y", "nvidia-smi dmon -s pucvmet -d 1 -c 5",
])
def test_what_looks_like_one_but_is_ordinary_stays(text: str) -> None:
    assert redaction.command(text) == text


@pytest.mark.parametrize("piece", [
    "a", "a.", "a=", "key=", "token=", "token=$", "password: ", "x://", "a://b:", "a://b:c", "eyJ", "eyJ-", "-eyJaaaaaaaaa.",
    "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "curl ", "curl -u ", "curl -u a:", "mysql -p", "docker login ", "echo ",
    "echo a |", "bearer ", "Basic aaaaaaaa", "'", "\"", "\\'", "['", "x','", "set ", "set -a ", "config password ", "1:", "%",
    "SG.aaaaaaaaaaaaaaaa", "aaaaaaaa-", "M", "cmVmdGtu", "xoxa-", "_", "@", "a@b:", "token='", "key='", "-p ", " -", " ",
    "wandb login ", "wandb login --a ", "https://hooks.slack.com/services/", "pat", "AC0", "A3T", "~", "0Q~", "//a:", " //",
])
def test_it_takes_no_more_than_linear_time(piece: str) -> None:
    text = (piece * 12_000)[:12_000]

    def took_s() -> float:
        began_s = time.thread_time()
        redaction.command(text)
        redaction.command("x " + text + "@")
        return time.thread_time() - began_s

    assert any(took_s() < 0.5 for _ in range(5)), "some tenths of a second, whatever shares the processor at times"


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
