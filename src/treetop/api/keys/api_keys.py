"""API keys with names and limits, and the file that has them (`--api-keys-file`)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from starlette.datastructures import Headers

from treetop.api.bodies import Bodies
from treetop.api.keys.rate_limits import Limits, RateLimits
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError

MAX_KEYS = 1024
_LONGEST_FILE = 2**20
_NAME, _KEY = re.compile(r"[A-Za-z0-9._-]{1,64}"), re.compile(r"[\x21-\x7e]{1,512}")
_COUNTS = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "max_rows": 2**31 - 1, "max_bodies_bytes": 2**50}
"""Members of a key that are whole numbers above 0, and the most that each may be."""
_MEMBERS = ("name", "key", *_COUNTS, "cache_salt")
_SALT_LENGTH = 256
_OPTION = {False: "--api-key", True: "--admin-api-key"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and what requests that bring it may have. None for no limit.

    key: never told to anybody.
    requests_per_minute: that are more than reads, of all API processes together.
    tokens_per_minute: of prompts and outputs, of all API processes together.
    max_rows: of each engine, at a time.
    max_bodies_bytes: of each API process, as `--max-bodies-bytes`; none of its bodies may be larger.
    cache_salt: comes before what its requests say of it, so that its prefixes are its own.
    owner: whose what it keeps is: of the name, which stays where the key is changed; of a key without a name what the
        key is not to be read from (`response_store.py`).
    is_admin: may do what changes the server for everybody, beside what others may.
    """

    name: str
    key: str
    owner: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_rows: int | None = None
    max_bodies_bytes: int | None = None
    cache_salt: str | None = None
    is_admin: bool = False

    def salt(self, asked: str | None) -> str:
        """What keeps apart the prefixes of a request of this key. asked: by the request itself."""
        return asked or "" if self.cache_salt is None else f"{len(self.cache_salt)}:{self.cache_salt}{asked or ''}"


CALLER: ContextVar[ApiKey | None] = ContextVar("CALLER", default=None)
"""The key that the request in hand came with."""


class Keys:
    """Which keys are served, and what each may have at the moment. False without any but an admin's: anybody is served.

    has_admin: whether there is a key that may do what changes the server for everybody.
    """

    def __init__(self, options: ServeOptions, text: str | None, limits: RateLimits | None = None) -> None:
        """text: of the file with keys. limits: of this process alone by default. Raises ConfigError."""
        self._options, self.limits = options, limits or RateLimits()
        self.all_bodies = Bodies(options.max_body_bytes, options.bodies_bytes)
        self._of: dict[bytes, ApiKey] = {}
        self._bodies: dict[str, Bodies] = {}
        self.has_admin = options.admin_api_key is not None
        self.replace(text)

    @classmethod
    def of(cls, options: ServeOptions) -> "Keys":
        """Of a process that is alone. Raises ConfigError."""
        return cls(options, read_file(options.api_keys_file))

    def __bool__(self) -> bool:
        return len(self._of) > self.has_admin

    def replace(self, text: str | None) -> None:
        """Go by another text of the file from now on. Raises ConfigError, and nothing has changed."""
        keys = all_keys(self._options, text)
        self.limits.replace({each.name: Limits(each.requests_per_minute, each.tokens_per_minute) for each in keys})
        self._of = {_digest(each.key): each for each in keys}
        own = {each.name: each.max_bodies_bytes for each in keys if each.max_bodies_bytes is not None}
        most, everybody = self._options.max_body_bytes, self.all_bodies
        self._bodies = {
            name: Bodies(min(most, budget), budget, within=everybody, of_key=True) for name, budget in own.items()
        }

    def of_request(self, headers: Headers) -> ApiKey | None:
        """The key of ours that is sent. How long it takes tells nothing of how much of another is right."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        bearer = given.strip() if scheme.lower() == "bearer" else ""
        for sent in (bearer, headers.get("x-api-key", "").strip()):
            if (found := self._of.get(_digest(sent))) is not None:
                return found
        return None

    def of_owner(self, owner: str) -> ApiKey | None:
        """The key whose requests keep things under this name."""
        return next((each for each in self._of.values() if each.owner == owner), None) if owner else None

    def bodies(self, key: ApiKey | None) -> Bodies:
        """The budget that a request's body comes out of."""
        return self.all_bodies if key is None else self._bodies.get(key.name, self.all_bodies)


def read_file(path: str | None) -> str | None:
    """The text of a file with keys. Raises ConfigError."""
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
        if len(content) > _LONGEST_FILE:
            raise ConfigError(f"{path}: {len(content)} bytes: at most {_LONGEST_FILE}")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file {path}: {error}") from None


def all_keys(options: ServeOptions, text: str | None) -> list[ApiKey]:
    """Of the command line, which have no limits and are named by their place, and of the file, whose text this is.

    The one of `--admin-api-key`, if there is one, is the first.

    Raises ConfigError, which names each line of the file that is wrong.
    """
    named = [(f"key-{number}", key, False) for number, key in enumerate(options.api_key, 1)]
    if options.admin_api_key is not None:
        named.insert(0, ("admin", options.admin_api_key, True))
    plain = [ApiKey(name, key, _digest(key).hex(), is_admin=is_admin) for name, key, is_admin in named]
    if text is None:
        return plain
    return [*plain, *_KeyFile(str(options.api_keys_file), plain).keys(text)]


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogatepass")).digest()


class _KeyFile:
    """Reads a file of keys, YAML or JSON, and finds all that is wrong with it. No message holds a key."""

    def __init__(self, path: str, others: Iterable[ApiKey]) -> None:
        self._path, self._problems = path, list[str]()
        self._names = {each.name: _OPTION[each.is_admin] for each in others}
        self._keys = {each.key: _OPTION[each.is_admin] for each in others}

    def keys(self, text: str) -> list[ApiKey]:
        """Raises ConfigError."""
        try:
            root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)  # JSON may be indented with tabs
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            told = "neither YAML nor JSON"
            if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):  # others may hold a key
                told = error.problem or told
            raise ConfigError(f"{self._path}:{1 if mark is None else mark.line + 1}: {told}") from None
        listed = self._listed(root)
        found = [each for number, node in enumerate(listed) if (each := self._key(node, f"keys[{number}]"))]
        if self._problems:
            raise ConfigError("; ".join(self._problems))
        return found

    def _listed(self, root: Any) -> Sequence[Any]:
        if root is None:
            self._problems.append(f"{self._path}:1: no keys: expected `keys:` and a list")
            return ()
        members = self._members(root, "the file", ("keys",))
        listed = members.get("keys")
        if members and not isinstance(listed, yaml.SequenceNode):
            self._say(listed, "keys: must be a list")
            return ()
        if listed is None:
            if not self._problems:
                self._say(root, "keys: missing")
            return ()
        if not listed.value:
            self._say(listed, "keys: the list is empty: nobody would be served")
        if len(listed.value) > MAX_KEYS:
            self._say(listed, f"keys: {len(listed.value)} of them: at most {MAX_KEYS}")
            return ()
        return list(listed.value)

    def _members(self, node: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
        """Nodes by their names, of an object."""
        if not isinstance(node, yaml.MappingNode):
            self._say(node, f"{where}: must be an object with {', '.join(known)}")
            return {}
        members: dict[str, Any] = {}
        for name, value in node.value:
            said = name.value if isinstance(name, yaml.ScalarNode) else "?"
            if said not in known:
                self._say(name, f"{where}: an unknown member, there are {', '.join(known)}")
            elif said in members:
                self._say(name, f"{where}.{said}: given twice")
            else:
                members[said] = value
        return members

    def _key(self, node: Any, where: str) -> ApiKey | None:
        before = len(self._problems)
        members = self._members(node, where, _MEMBERS)
        if len(self._problems) == before:
            for name in ("name", "key"):
                if name not in members:
                    self._say(node, f"{where}.{name}: missing")
        told = {name: self._value(members[name], name, f"{where}.{name}") for name in members}
        if len(self._problems) > before:
            return None
        for kind, seen, name in (("name", self._names, told["name"]), ("key", self._keys, told["key"])):
            if name in seen:
                self._say(members[kind], f"{where}.{kind}: the same as that of {seen[name]}")
            seen.setdefault(name, f"line {members[kind].start_mark.line + 1}")
        return ApiKey(**told, owner=f"name:{told['name']}")

    def _value(self, node: Any, member: str, where: str) -> Any:
        """What a member says, None if that is wrong."""
        value, kind = None, "?"
        if isinstance(node, yaml.ScalarNode):
            value, kind = node.value, node.tag.rpartition(":")[2]
        if member in _COUNTS:
            number = int(value) if kind == "int" and value is not None and re.fullmatch(r"[0-9]{1,18}", value) else 0
            if not 0 < number <= _COUNTS[member]:
                self._say(node, f"{where}: must be a whole number from 1 to {_COUNTS[member]}")
            return number
        if kind != "str" or value is None:
            self._say(node, f"{where}: must be text{', put it in quotes' if kind not in ('?', 'null') else ''}")
        elif member == "name" and not _NAME.fullmatch(value):
            self._say(node, f"{where}: up to 64 letters, digits, dots, dashes and underscores")
        elif member == "key" and not _KEY.fullmatch(value):
            self._say(node, f"{where}: up to 512 visible characters of ASCII, at least one")
        elif member == "cache_salt" and not 0 < len(value) <= _SALT_LENGTH:
            self._say(node, f"{where}: from 1 to {_SALT_LENGTH} characters")
        return value

    def _say(self, node: Any, problem: str) -> None:
        line = 1 if node is None else node.start_mark.line + 1
        self._problems.append(f"{self._path}:{line}: {problem}")
