"""Redacts secrets in command lines before a snapshot or a recording leaves the node: many people read tickets.

A command is one line, its arguments joined by spaces. A value is hidden where the name before it
says that it is a secret (``--hf-token X``, ``WANDB_API_KEY=X``, ``"password": "x"``), where an ambiguous
name (``--key``) stands before random letters and digits, where the value itself has a form that only credentials
have, and where the program before it takes one there (``curl -u``, ``sshpass -p``). Names and everything else stay,
because they distinguish jobs. In doubt a value is hidden.

A command line is untrusted text of up to 100 kB, so every pattern here takes linear time at most.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeVar

from msgspec.structs import replace

from gputop.core.samples import HostProcess, NodeSample, ProcessSample

HIDDEN = "***"

_P = TypeVar("_P", ProcessSample, HostProcess)

_NAME = re.compile(r"(?<![\w.$\-])(?P<dash>-{1,2})?(?P<name>[A-Za-z_][\w.\-]*)|(?<=[.$\-])(?P<tail>[A-Za-z_]\w*)")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# x=1, x := 1, "x": 1, os.environ['x'] = 1, setdefault("x", "1"), PASSWORD '1'; a quote may be escaped.
_ASSIGN = re.compile(r"\\?[\"']?\s{0,3}(?::=|=>|::)\s{0,3}|\\?[\"']\]?\s{0,3}:\s{0,3}(?=\\?[\"'])"
                     r"|\\?[\"']?(?:\]?(?:=(?!\s)|\s=\s|\s{0,3}=\s{0,3}(?=\\?[\"']))|\s?:(?!//)\s?)"
                     r"|\\?[\"']\s{0,3},\s{0,3}(?=\\?[\"'])|\s(?=([\"'])[^\"']{0,400}\1(?!\s?[:=]))")
_SET = re.compile(r"(?:^|\s)(?:set|setenv|config)\s(?:-\S+\s)*\S*$")  # aws configure set NAME VALUE

# The last word of a name that always holds a secret; "token" is also a piece of text, see _TEXT_TOKENS.
_SECRET = ("password", "passwords", "passwd", "passphrase", "passcode", "secret", "secrets", "apikey", "authorization",
           "credentials", "token", "passphrases", "pw", "creds", "passwort")
_SECRET_KEYS = frozenset({  # the words before "key" in names of credentials; other keys are those of dictionaries
    "api", "access", "secret", "private", "auth", "account", "license", "encryption", "signing", "storage", "ssh",
    "master", "aws", "iam", "hmac", "wandb", "openai", "anthropic", "comet", "neptune", "shared",
    "subscription", "service", "deploy"})
_MAYBE = frozenset({"auth", "key", "credential", "sig", "signature", "sas", "cookie", "session", "license", "dsn",
                    "pat", "bearer", "jwt", "login"})
_SHORT = frozenset({"pass", "pwd", "cookie"})  # secrets, but where a number or a path follows
_ROADS = frozenset({"bypass", "compass", "underpass", "overpass", "trespass", "lowpass", "highpass", "bandpass",
                    "multipass", "oldpwd"})
_PATH = re.compile(r"\.{0,2}/[\w.-]+(?:/[\w.-]*)*")
_TEXT_TOKENS = frozenset({"pad", "eos", "bos", "mask", "unk", "sep", "cls", "special", "stop", "start", "end", "image",
                          "video", "audio", "per", "prefix", "placeholder", "begin", "next", "last", "first", "oov",
                          "by", "each", "sot", "eot", "trigger", "class", "blank", "separator", "padding", "extra"})
_HARMLESS = re.compile(r"(?:true|false|none|null|auto|yes|no|\$\{?\w+\}?|<[\w|]*>|\d{1,6}|\*+)?[\"',;)}\]]*", re.I)

# Forms that only credentials have, by their issuers' documentation. What is repeated without an end stands last.
_SHAPES = re.compile(r"""
    -----BEGIN\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----.*?(?:-----END\ [A-Z0-9 ]{0,40}PRIVATE\ KEY[ A-Z]*-----|$)
  | ----\ BEGIN\ SSH2\ ENCRYPTED\ PRIVATE\ KEY.* | PuTTY-User-Key-File-\d.*
  | (?:(?<=[\s=:"'])|^)(?:AKC[A-Za-z0-9]{10,}|AP\d[A-Za-z0-9]{8,}|AP[A-F](?=[A-Za-z]*\d|[a-z]+[A-Z])[A-Za-z0-9]{8,})
  | \b(?:
    hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z]{30,} | gh[pousr]_(?:[A-Za-z0-9]{20,}|\w{36,}) | github_pat_\w{20,}
  | gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|oas|imt|ffct)-[\w-]{16,} | GR1348941[\w-]{20,}
  | (?i:xox[a-z](?:\.xox[a-z])?)-(?:[\w-]{10,}|(?:\d{1,20}-)+\w+) | xapp-[\w-]{10,}
  | (?:A3T[0-9A-Z]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}\b
  | AIza[\w-]{30,} | ya29\.[\w.-]{20,} | GOCSPX-[\w-]{20,} | 1//0[\w-]{30,}
  | sk-[A-Za-z0-9_-]{20,} | nvapi-[\w-]{20,} | dckr_(?:pat|oat)_[\w-]{20,} | pypi-[\w-]{16,}
  | npm_[A-Za-z0-9]{30,} | eyJ[\w-]{8,400}\.[\w-]{4,}(?:\.[\w-]*)* | (?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}
  | whsec_[\w+/=-]{16,} | (?:AC|SK)[0-9a-z]{32}\b | SG\.[\w-]{16,80}\.[\w-]{16,} | [0-9a-z]{32}-us\d{1,2}\b
  | key-[0-9a-z]{32}\b | sq0[a-z]{3}-[\\\w-]{22,} | EAAA[\w-]{56,} | \d{8,10}:[\w-]{35}(?![\w-])
  | [MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}
  | dapi[0-9a-f]{32}\b | do[opr]_v1_[0-9a-f]{40,} | hv[sbr]\.[\w-]{20,} | dp\.[a-z]{2,5}\.[\w.-]{20,}
  | lin_(?:api|oauth)_\w{20,} | ntn_\w{20,} | secret_[A-Za-z0-9]{40,} | PMAK-[\w-]{20,}
  | gl(?:c|sa)_[\w+/=]{20,}
  | NRAK-\w{20,} | sntry[su]_[\w+/=-]{20,} | shp(?:at|ca|pa|ss)_[0-9a-f]{32} | pul-[0-9a-f]{40} | r8_\w{30,}
  | gsk_\w{20,} | wandb_v1_\w{20,} | pplx-\w{20,} | xai-\w{20,} | tskey-[\w-]{16,} | sbp_[0-9a-f]{40}
  | HRKU-[\w-]{20,} | fm[12][a-z]?_[\w+/=-]{20,} | pscale_\w{3,8}_[\w.=-]{20,} | AGE-SECRET-KEY-1[0-9A-Z]{20,}
  | [\w~.-]{3}\dQ~[\w~.-]{31,34} | pat\w{14}\.[0-9a-f]{64} | rubygems_[0-9a-f]{48} | sk\.eyJ[\w.-]{20,}
  | [A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,} | cmVmdGtu\w{40,} | cio[A-Za-z0-9]{32}\b
  )
""", re.X | re.S)
# Addresses that whoever knows them may write to.
_HOOK = re.compile(r"""(?i)(?P<kept>\b(?:
    hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/ | discord(?:app)?\.com/api/webhooks/
  | webhook\.office\.com/webhookb2/ | outlook\.office(?:365)?\.com/webhook/ | api\.telegram\.org/bot
  | hooks\.zapier\.com/hooks/ | api\.softlayer\.com/soap/v[\d.]{1,5}/
  | maker\.ifttt\.com/trigger/ ))[^\s"'<>]+""", re.X)
_AFTER = re.compile(r"""
    (?P<scheme>\b(?:(?:[Bb]earer|BEARER)\s+(?=\S{0,400}\d|\S{24})
      | [Bb]asic\s+(?=[\w+/]{8,400}={0,2}(?![\w-]))(?=\S{0,400}[A-Z\d=])
      | wandb\s+login(?:\s+--\S+){0,9}\s+(?=\S{0,400}\d)))(?!--)[\w.~+/=-]{8,}
  | (?P<login>\b(?:(?:add-)?authtoken|vault\s+login|snyk\s+auth|IDENTIFIED\s+BY)\s+["']?)(?![-"'])[^\s"']+
  | (?P<echo>\becho\s+(?:-\w+\s+)?)\S{1,400}
    (?=\s*\|[^|;]{0,80}?(?:-stdin\b|\bchpasswd\b|\bsudo\s+-S\b|\bpassphrase-fd\b))
  | (?P<npm>:_authToken=\s{1,9})[^\s"']+
  | (?P<aws>(?i:\baws.{0,20}?(?:key|pw|pwd|pass|password|token).{0,20}?)["'])[\w/+]{40}(?=["'])
  | (?P<prefix>\bpass:)[^\s"']+""", re.X)
# The password of an address may hold a slash; a port may not be taken for one.
_URL_USER = re.compile(r"(?P<scheme>\b[A-Za-z][\w+.-]{0,30}://|(?<=\s)//)(?P<user>[^\s/:@?#\"']{0,400})"
                       r"(?P<password>:(?!\d{1,5}[/?#,])(?:(?!://)[^\s\"']){0,400})?@")
_DSN = re.compile(r"(?P<kept>\b[\w.-]{1,60}:)[^\s:@/\"']{1,200}(?=@(?:tcp|unix)\()")
_WEB = re.compile(r"(?:.*\+)?(?:https?|ftps?|wss?)://", re.I)
_ACCOUNTS = frozenset({"git", "anonymous", "user", "oauth2", "x-access-token", "x-token-auth", "***"})

# Programs that take a secret in an option of their own: the option, and what of its value stays.
_WORD = r"(?P<value>\"[^\"]*\"|'[^']*'|\S+)"
_PROGRAMS = {name: pattern for names, pattern in (  # compiled by re when one is first met
    ("curl", r"(?P<kept>\s(?:-[a-zA-Z#]{0,12}?[uUbE]|--(?:user|proxy-user|cookie|cert|proxy-cert))(?:\s+|=)?)"
             r"(?=\S*[:=])" + _WORD),
    ("http https xh xhs", r"(?P<kept>\s(?:-a|--auth)(?:\s+|=)?)(?=\S*:)" + _WORD),
    ("mysql mysqldump mysqladmin mysqlimport mysqlcheck mysqlslap mysqlsh mariadb mariadb-dump mariadb-admin",
     r"(?P<kept>\s-p)" + _WORD),
    ("redis-cli valkey-cli keydb-cli redis-benchmark", r"(?P<kept>\s-a\s*)" + _WORD),
    ("sshpass", r"(?P<kept>\A(?:\s-[veP]\s?\S*)*\s-p\s*)" + _WORD),
    ("mongo mongosh mongodump mongorestore mongoimport mongoexport cqlsh twine influx clickhouse-client",
     r"(?P<kept>\s-p\s*)" + _WORD),
    ("docker podman nerdctl helm oras az buildah skopeo singularity apptainer oc crane regctl",
     r"(?P<kept>\slogin\s(?:[^;|&]{0,200}?\s)?-p\s*)" + _WORD),
    ("ldapsearch ldapmodify ldapadd ldapdelete ldapwhoami ldappasswd", r"(?P<kept>\s-w\s*)" + _WORD),
    ("sqlcmd bcp ipmitool unzip zip zipcloak mosquitto_pub mosquitto_sub isql", r"(?P<kept>\s-P\s*)" + _WORD),
    ("7z 7za 7zr rar unrar", r"(?P<kept>\s-h?p)" + _WORD),
    ("smbclient smbget rpcclient mount.cifs", r"(?P<kept>\s-U\s*[^\s%]{1,200}%)" + _WORD),
    ("openssl", r"(?P<kept>\s-(?:k|K|passin|passout|pass)\s+)(?!(?:file|env|fd|stdin))" + _WORD),
    ("xfreerdp xfreerdp3 wlfreerdp", r"(?P<kept>\s/p:)" + _WORD),
    ("snmpwalk snmpget snmpset snmpbulkwalk", r"(?P<kept>\s-[cAX]\s*)" + _WORD),
    ("lftp", r"(?P<kept>\s-u\s*[^\s,]{1,200},)" + _WORD),
    ("ncftpget ncftpput ncftpls ncftp", r"(?P<kept>\s-p\s*)" + _WORD),
    ("htpasswd", r"(?P<kept>\s-\w*b\w*\s+\S+\s+\S+\s+)" + _WORD),
) for name in names.split()}
_PROGRAM = re.compile(r"(?:(?<=[\s/;|&\"'(`])|^)(" + "|".join(map(re.escape, sorted(_PROGRAMS, key=len, reverse=True)))
                      + r")(?=\s)")
_NEXT_COMMAND = re.compile(r"\s[;|&]|;\s")
_CACHED_CHARS, _MAX_CHECKED_CHARS = 4096, 128


def command(text: str) -> str:
    """``text`` with each secret replaced by ``***``."""
    return _redacted(text) if len(text) <= _CACHED_CHARS else _redacted.__wrapped__(text)


@lru_cache(maxsize=4096)
def _redacted(text: str) -> str:
    text = _SHAPES.sub(HIDDEN, text)
    text = _HOOK.sub(lambda m: m["kept"] + HIDDEN, text)
    text = _URL_USER.sub(_url, text)
    text = _DSN.sub(lambda m: m["kept"] + HIDDEN, text)
    text = _AFTER.sub(lambda m: m[m.lastgroup or 0] + HIDDEN, text)
    return _named(_programs(text))


def _programs(text: str) -> str:
    """Hide what programs take as a secret, each up to the next command of the line."""
    starts = list(_PROGRAM.finditer(text))
    if not starts:
        return text
    out = [text[:starts[0].end()]]
    for program, following in zip(starts, [*starts[1:], None], strict=True):
        stop = len(text) if following is None else following.end()
        limit = _NEXT_COMMAND.search(text, program.end(), stop)
        end = stop if limit is None else limit.start()
        out += [re.sub(_PROGRAMS[program[1]], _option, text[program.end():end]), text[end:stop]]
    return "".join(out)


def _option(match: re.Match[str]) -> str:
    value = match["value"]
    quote = value[0] if value[0] in "\"'" else ""
    user, colon, _ = value.strip("\"'").partition(":")
    # `curl -u ana:secret` keeps the user, unless that is the secret: `-u TOKEN:`.
    kept = f"{user}:" if match["kept"].rstrip(" =").endswith(("-u", "-U", "-user", "-a", "-auth")) and colon \
        and not value.rstrip("\"'").endswith(":") and not _random(user) else ""
    return f"{match['kept']}{quote}{kept}{HIDDEN}{quote}"


def _named(text: str) -> str:
    """Hide the values of what is named as a secret."""
    out: list[str] = []
    pos = 0
    while (match := _NAME.search(text, pos)) is not None:
        value = _value(text, match)
        end = match.end() if value is None else value[1]
        out.append(text[pos:end] if value is None else text[pos:value[0]] + HIDDEN)
        pos = end
    return "".join((*out, text[pos:]))


def sample(node: NodeSample) -> NodeSample:
    """``node`` with the commands of all its processes redacted."""
    processes = tuple(_process(p) for p in node.processes)
    top = tuple(_process(p) for p in node.host.top_processes)
    if processes == node.processes and top == node.host.top_processes:
        return node
    return replace(node, processes=processes, host=replace(node.host, top_processes=top))


def _process(process: _P) -> _P:
    return process if process.command is None else replace(process, command=command(process.command))


def _url(match: re.Match[str]) -> str:
    user, password = match["user"], match["password"]
    if password is not None:
        return f"{match['scheme']}{HIDDEN if len(password) == 1 else user}:{HIDDEN}@"
    # ssh://git@host names an account; https://WORD@host is one that serves as a password.
    account = user.lower() in _ACCOUNTS or not (_WEB.fullmatch(match["scheme"]) or _random(user))
    return f"{match['scheme']}{user if account else HIDDEN}@"


def _value(text: str, name: re.Match[str]) -> tuple[int, int] | None:
    """Begin and end of the secret that ``name`` is given; None where it is no secret."""
    kind = _kind(name["name"] or name["tail"])
    if kind is None:
        return None
    assign = _ASSIGN.match(text, name.end())
    if assign is not None:
        begin = assign.end()
    elif (space := re.compile(r"\s+(?!-)").match(text, name.end())) is not None and (
            name["dash"] or (kind != "maybe" and _SET.search(text, max(0, name.start() - 60), name.start()))):
        begin = space.end()
    else:
        return None
    begin += text[begin:begin + 1] == "\\"
    limit = begin + _MAX_CHECKED_CHARS if kind == "maybe" else None  # bounds the cost of many ambiguous names
    quote = text[begin:begin + 1]
    inside = name.start() > 0 and not text[name.start() - 1].isspace()
    if quote and quote in "\"'":
        begin += 1
        stop = text.find(quote, begin)
        end = len(text) if stop < 0 else stop - (text[stop - 1] == "\\" and stop - 1 > begin)
    elif inside:  # in a URL's query, a list, JSON: other values follow in the same word
        end = _until(text, begin, r"[\s&,;)}\]\"']", limit)
    else:
        end = _until(text, begin, r"\s", limit)
    if (name["name"] or "").lower() == "authorization":  # "Authorization: Basic dXNlcjpw"
        scheme = re.compile(r"\w+\s+(?=[^\s-])").match(text, begin)
        end = _until(text, scheme.end(), r"[\s\"']") if scheme is not None else end
    value = text[begin:end]
    if kind == "short":
        if _PATH.fullmatch(value[:_MAX_CHECKED_CHARS]):
            return None
        kind = "token"
    if _HARMLESS.fullmatch(value) and not (kind == "secret" and value.isdigit()):
        return None
    if kind == "maybe" and not _random(value):
        return None
    return begin, end


def _until(text: str, begin: int, stop: str, limit: int | None = None) -> int:
    limit = len(text) if limit is None else min(len(text), limit)
    match = re.compile(stop).search(text, begin, limit)
    return limit if match is None else match.start()


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
    if last in _SECRET or last.endswith(
            ("password", "passwd", "secret", "apikey", "secretkey", "accesskey", "privatekey", "awskey")):
        return "secret"
    if last == "key" and before in _SECRET_KEYS:
        return "secret"
    if last in _SHORT:
        db = before in ("db", "user", "admin", "root", "redis", "mysql", "smtp", "ftp", "pg", "key", "proxy", "ssh")
        return "secret" if db else "short"
    if last.endswith(("pass", "pwd")) and last not in _ROADS:  # sshpass, requirepass, keypass
        return "short"
    return "maybe" if last in _MAYBE or last == "keys" else None


def _random(value: str) -> bool:
    """Return whether a value mixes letters and digits as random text does."""
    value = value[:_MAX_CHECKED_CHARS].strip("\"'")
    if len(value) < 20 or not re.fullmatch(r"[\w+=~%.:-]+", value):
        return False
    return len(re.findall(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])|[a-z](?=[A-Z])", value)) >= 4
