"""Secrets out of command lines: before a snapshot or a recording leaves the node, tickets are read by many.

A command is one line, its arguments joined by spaces. A value is hidden where the name before it
says that it is a secret (``--hf-token X``, ``WANDB_API_KEY=X``, ``"password": "x"``), where a name
that may mean one stands before letters and digits at random, and where the value itself has
a form that only credentials have. Names, and everything else, stay: they are what tells two jobs apart.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from gputop.core.samples import HostProcess, NodeSample, ProcessSample

HIDDEN = "***"

_P = TypeVar("_P", ProcessSample, HostProcess)

_NAME = re.compile(r"(?<![\w.$\-])(?P<dash>-{1,2})?(?P<name>[A-Za-z_][\w.\-]*)|(?<=[.$\-])(?P<tail>[A-Za-z_]\w*)")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ASSIGN = re.compile(r"[\"']?(?:=(?!\s)|\s=\s|\s?:(?!//)\s?)")

# The last word of a name that always holds a secret; "token" is also a piece of text, see _TEXT_TOKENS.
_SECRET = ("password", "passwords", "passwd", "passphrase", "passcode", "secret", "secrets", "apikey", "authorization",
           "credentials", "token")
_SECRET_KEYS = frozenset({  # what comes before "key" where the key is no dictionary's
    "api", "access", "secret", "private", "auth", "account", "license", "encryption", "signing", "storage", "ssh",
    "master", "wandb", "openai", "anthropic", "comet", "neptune", "shared", "subscription", "service", "deploy"})
_MAYBE = frozenset({"auth", "key", "credential", "sig", "signature", "sas", "cookie", "session", "license", "dsn",
                    "pat", "bearer", "jwt", "pass", "pwd", "login"})
_TEXT_TOKENS = frozenset({"pad", "eos", "bos", "mask", "unk", "sep", "cls", "special", "stop", "start", "end", "image",
                          "video", "audio", "per", "prefix", "placeholder", "begin", "next", "last", "first", "oov",
                          "by", "each", "sot", "eot", "trigger", "class", "blank", "separator", "padding", "extra"})
_HARMLESS = re.compile(r"(?:true|false|none|null|auto|yes|no|\$\{?\w+\}?|<[\w|]*>|\d{1,6}|\*+)?[\"',;)}\]]*", re.I)

# Forms that only credentials have, by their issuers' documentation.
_SHAPES = re.compile(r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|$)
  | \bhf_[A-Za-z0-9]{20,} | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,} | \bglpat-[\w-]{16,}
  | \bxox[abeprs]-[\w-]{10,} | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b | \bAIza[\w-]{30,} | \bya29\.[\w.-]{20,}
  | \bsk-[A-Za-z0-9_-]{20,} | \bnvapi-[\w-]{20,} | \bdckr_pat_[\w-]{20,} | \bpypi-[\w-]{40,} | \bnpm_[A-Za-z0-9]{30,}
  | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]* | \b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}
""", re.X | re.S)
_AFTER = re.compile(r"(?P<kept>\b(?:[Bb]earer|wandb\s+login(?:\s+--\S+)*)\s+)(?!--)(?=\S*\d)[\w.~+/=-]{12,}")
_URL_USER = re.compile(r"(?P<scheme>\b[A-Za-z][\w+.-]*://)(?P<user>[^\s/:@?#]*)(?P<password>:[^\s/]*)?@")


@lru_cache(maxsize=4096)
def command(text: str) -> str:
    """``text`` with each secret replaced by ``***``."""
    text = _SHAPES.sub(HIDDEN, text)
    text = _URL_USER.sub(_url, text)
    text = _AFTER.sub(lambda m: m["kept"] + HIDDEN, text)
    out: list[str] = []
    at = 0
    while (found := _NAME.search(text, at)) is not None:
        value = _value(text, found)
        end = found.end() if value is None else value[1]
        out.append(text[at:end] if value is None else text[at:value[0]] + HIDDEN)
        at = end
    return "".join((*out, text[at:]))


def sample(node: NodeSample) -> NodeSample:
    """``node`` with the commands of all its processes redacted."""
    processes = tuple(_process(p) for p in node.processes)
    top = tuple(_process(p) for p in node.host.top_processes)
    if processes == node.processes and top == node.host.top_processes:
        return node
    return replace(node, processes=processes, host=replace(node.host, top_processes=top))


def _process(process: _P) -> _P:
    return process if process.command is None else replace(process, command=command(process.command))


def _url(found: re.Match[str]) -> str:
    user, password = found["user"], found["password"]
    if password is not None:
        return f"{found['scheme']}{user}:{HIDDEN}@"
    # ssh://git@host names an account, https://KEY@host is one.
    return f"{found['scheme']}{HIDDEN if _random(user) else user}@"


def _value(text: str, name: re.Match[str]) -> tuple[int, int] | None:
    """Begin and end of the secret that ``name`` is given; None where it is no secret."""
    kind = _kind(name["name"] or name["tail"])
    if kind is None:
        return None
    assign = _ASSIGN.match(text, name.end())
    if assign is not None:
        begin = assign.end()
    elif name["dash"] and (space := re.compile(r"\s+(?!-)").match(text, name.end())) is not None:
        begin = space.end()
    else:
        return None
    quote = text[begin:begin + 1]
    inside = name.start() > 0 and not text[name.start() - 1].isspace()
    if quote and quote in "\"'":
        begin += 1
        stop = text.find(quote, begin)
        end = len(text) if stop < 0 else stop
    elif inside:  # in a URL's query, a list, JSON: other values follow in the same word
        end = _until(text, begin, r"[\s&,;)}\]\"']")
    else:
        end = _until(text, begin, r"\s")
    if (name["name"] or "").lower() == "authorization":  # "Authorization: Basic dXNlcjpw"
        scheme = re.compile(r"\w+\s+(?=[^\s-])").match(text, begin)
        end = _until(text, scheme.end(), r"[\s\"']") if scheme is not None else end
    value = text[begin:end]
    if _HARMLESS.fullmatch(value) and not (kind == "secret" and value.isdigit()):
        return None
    if kind == "maybe" and not _random(value):
        return None
    return begin, end


def _until(text: str, begin: int, stop: str) -> int:
    found = re.compile(stop).search(text, begin)
    return len(text) if found is None else found.start()


def _kind(name: str) -> str | None:
    """"secret" or "token" (a number is none) for a name that means one, "maybe", or None."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or (words == ["pwd"] and name.isupper()):  # the shell's PWD
        return None
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "tokens" and before in ("auth", "access", "api", "hf"):
        return "secret"
    if last.endswith("token"):
        return "token" if before not in _TEXT_TOKENS else None
    if last in _SECRET or last.endswith(("password", "passwd", "secret", "apikey")):
        return "secret"
    if last == "key" and before in _SECRET_KEYS:
        return "secret"
    if last in ("pass", "pwd") and before in ("db", "user", "admin", "root", "redis", "mysql", "smtp", "ftp", "pg"):
        return "secret"
    return "maybe" if last in _MAYBE or last == "keys" else None


def _random(value: str) -> bool:
    """Whether a value has letters and digits as only chance mixes them."""
    value = value.strip("\"'")
    if len(value) < 20 or not re.fullmatch(r"[\w+=~%.:-]+", value):
        return False
    return len(re.findall(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])|[a-z](?=[A-Z])", value)) >= 4
