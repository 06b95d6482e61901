# ruff: noqa
# fmt: off
"""Mechanical renames, one family of words a commit: rename.py NAME... (in a clean checkout), see families.py.

Environment: WORDS_LENIENT=1 goes on where an expected pattern is missing; WORDS_NO_COMMIT=1 leaves the tree changed.
PYTHON: the interpreter for scripts/reference.py. RUFF: ruff.
"""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from families import FAMILIES  # noqa: E402

LENIENT = os.environ.get("WORDS_LENIENT") == "1"
RUFF = os.environ.get("RUFF", ".venv/bin/ruff")
PYTHON = os.environ.get("PYTHON", ".venv/bin/python")
LIMIT = 120
TEXT = (".md", ".toml", ".yml", ".yaml", ".json", ".sh", ".txt", ".svg", ".css", ".js", ".html", ".cff")
# Generated, frozen or historic: never edited by a rename.
NEVER = ["tests/frozen/*", "docs/figures/round*", "docs/figures/smol*", "src/treetop/assets/*", "benchmarks/presets/*", "LICENSE", "CHANGELOG.md",
         "benchmarks/log.md", "docs/options.md", "docs/endpoints.md", "docs/errors.md", "docs/fields.md",
         "docs/metrics.md", "docs/models.md", "docs/benchmarks.md", "*/checkpoints/*.json", "*.safetensors"]


class Missing(Exception):
    pass


def git(*args):
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout


def complain(words):
    if not LENIENT:
        raise Missing(words)
    print("  lenient:", words, file=sys.stderr)


def distinctive(name):
    """Whether a word of prose cannot be meant."""
    return "_" in name.strip("_") or bool(re.search(r"[a-z0-9][A-Z]", name))


def tracked():
    return [f for f in git("ls-files").splitlines() if Path(f).is_file() and not Path(f).is_symlink()]


def grepped(patterns):
    """Files that may match one of these."""
    lines = [part for n in patterns for part in n.split("\\n")[-1:] if part]
    arguments = [a for n in lines for a in ("-e", n)]
    return set(subprocess.run(["git", "grep", "-lP", *arguments], capture_output=True, text=True).stdout.splitlines())


def matches(path, globs):
    return any(fnmatch(path, g) for g in globs)


def comes_from(module, name, path, source):
    if path == "src/" + module.replace(".", "/") + ".py":
        return True
    for lines in re.findall(rf"^\s*from {re.escape(module)} import (\([^)]*\)|.*)$", source, re.MULTILINE):
        if re.search(rf"\b{name}\b", lines):
            return True
    return False


class Family:
    def __init__(self, name, message, moves=None, names=None, scoped=(), words=(), code=(), reference=False,
                 keep=(), notext=(), attributes=None, strings=(), expect=True):
        """names: NAME tokens in all Python files. scoped: (names, globs[, not_globs]). words: (regex, repl[, globs])
        in strings, comments and pages. code: (glob, regex, repl) on raw text of files, anywhere. keep: globs that names
        and words leave alone. notext: distinctive names that stay in text. attributes: names after a dot, or as a
        keyword argument, only."""
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.moves, self.names = dict(moves or {}), dict(names or {})


def words_of(pairs):
    if not pairs:
        return None
    return re.compile(r"(?<![\w])(" + "|".join(sorted(map(re.escape, pairs), key=len, reverse=True)) + r")(?![\w])")


def rename_in_fstring(text, names, pattern):
    """Names inside the braces of an f-string."""
    out, depth, first, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if depth == 0 and text[i : i + 2] in ("{{", "}}"):
            i += 2
            continue
        if c == "{":
            if depth == 0:
                out.append(text[first : i + 1])
                first = i + 1
            depth += 1
        elif c == "}" and depth:
            depth -= 1
            if depth == 0:
                inside = text[first:i]
                out.append(pattern.sub(lambda m: m[1] if quoted(inside, m.start()) else names[m[1]], inside))  # noqa: B023
                first = i
        i += 1
    return "".join(out) + text[first:]


def quoted(expression, at):
    before = expression[:at]
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1


def wrapped(lines, is_comment):
    """Lines of a docstring or a run of comments, none too long where a space allows it."""
    lines, i = list(lines), 0
    while i < len(lines):
        line = lines[i]
        if len(line) > LIMIT and "http" not in line and not line.lstrip(" #").startswith((">>>", "|")):
            cut = line.rfind(" ", 0, LIMIT + 1)
            body = len(line) - len(line.lstrip(" #"))
            if cut > body + 20:
                head, rest = line[:cut].rstrip(), line[cut + 1 :]
                indent = line[:body] if is_comment or not line.lstrip().startswith('"""') else line[: len(line) - len(line.lstrip())]
                item = not is_comment and re.match(r"\s*[\w*, ]+: ", line) and not line.lstrip().startswith('"""')
                nxt = lines[i + 1] if i + 1 < len(lines) else None
                own = None if nxt is None else nxt[: len(nxt) - len(nxt.lstrip(" #" if is_comment else " "))]
                joins = nxt is not None and nxt.strip(" #") and not re.match(r"\s*[\w*, ]+: ", nxt) and (
                    len(own) > len(indent) if item else own == indent) and not nxt.strip().startswith(("-", "|", '"""', "Args"))
                lines[i] = head
                if line.lstrip().startswith(('"""', 'r"""')) and nxt is not None and not nxt.strip():
                    # A summary line must stay one: it goes on, the blank line follows.
                    lines.insert(i + 1, indent + rest)
                elif joins:
                    lines[i + 1] = own + rest + " " + nxt[len(own):]
                else:
                    lines.insert(i + 1, (indent + "    " if item else indent) + rest)
        i += 1
    return lines


def text_names(family, names):
    return {a: b for a, b in names.items() if distinctive(a) and a not in family.notext}


def sub_words(family, path, text):
    for rule in family.words:
        pattern, repl = rule[0], rule[1]
        if len(rule) > 2 and not matches(path, rule[2]):
            continue
        text = re.sub(pattern, repl, text)
    return text


REFLECTS = {"setattr", "getattr", "hasattr", "delattr", "attrgetter", "Patch", "object"}


def dotted_names(match, names):
    *package, last = match[1].split(".")
    member = match[2] or ""
    if not member and last[:1].isupper() or not member and len(package) > 2:
        last = names.get(last, last)
    package = [names.get(part, part) if part[:1].isupper() else part for part in package]
    return ".".join([*package, last]) + re.sub(r"\w+", lambda m: names.get(m[0], m[0]), member)


PARAM = re.compile(r"^(\s*)((?:\*{0,2}\w+)(?:, (?:\*{0,2}\w+))*)(: )", re.MULTILINE)


def rename_python(family, path, source, names, modules):
    """modules: {dotted old: dotted new}."""
    pattern, text = words_of(names), text_names(family, names)
    text_pattern = words_of(text)
    local = dict(names)
    for old, new in modules.items():  # from PACKAGE import STEM
        (package, stem), new_stem = old.rsplit(".", 1), new.rsplit(".", 1)[1]
        if re.search(rf"^from {re.escape(package)} import .*\b{stem}\b(?! as)", source, re.MULTILINE | re.DOTALL):
            local.setdefault(stem, new_stem)
    local_pattern = words_of(local)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    edits, previous = [], None
    calls = []  # of each open bracket: whose arguments they are, and which argument it is
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        a = starts[token.start[0] - 1] + token.start[1]
        b = starts[token.end[0] - 1] + token.end[1]
        raw = token.string
        if token.type == tokenize.NAME:
            new = local.get(raw, raw)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            new = raw
            prefix = re.match(r"[a-zA-Z]*", raw)[0].lower() if token.type == tokenize.STRING else ""
            if "f" in prefix and local_pattern:
                new = rename_in_fstring(new, local, local_pattern)
            for old, other in modules.items():
                new = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", other, new)
                new = re.sub(rf"(?<![\w.]){re.escape(old.removeprefix('treetop.'))}(?!\w)", other.removeprefix("treetop."), new) if old.count(".") > 1 else new
            if text_pattern:
                new = text_pattern.sub(lambda m: text[m[1]], new)
            if pattern and (token.type == tokenize.COMMENT or '"""' in raw):
                # `name` in backticks, and "name: what it is" of docstrings and comments.
                new = re.sub(r"`([^`\n]+)`", lambda m: "`" + pattern.sub(lambda n: names[n[1]], m[1]) + "`", new)
                if '"""' in raw:
                    new = PARAM.sub(lambda m: m[1] + pattern.sub(lambda n: names[n[1]] if n[1].islower() or "_" in n[1] else n[1], m[2]) + m[3], new)
            if pattern and previous == ":" or previous == "->":  # a quoted annotation
                new = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), new) if raw[0] in "\"'" and '"""' not in raw else new
            elif pattern and raw[:1] == '"' and raw[1:-1] in names and (raw[1:-1] in family.strings or raw[1].isupper() and not raw[1:-1].isupper()):
                new = f'"{names[raw[1:-1]]}"'
            whose, number = calls[-1] if calls else ("", 0)
            if whose == "" and len(calls) > 1 and calls[-2][0] == "parametrize":
                whose, number = calls[-2]
            body = new[1:-1]
            if pattern and new[:1] == '"' and '"""' not in new and (whose in REFLECTS or (whose == "parametrize" and number == 0)):
                if re.fullmatch(r"\w+(, ?\w+)*", body):
                    new = '"' + re.sub(r"\w+", lambda m: names.get(m[0], m[0]), body) + '"'
            if names and token.type == tokenize.STRING and "treetop" in new:  # "treetop.package.module.Name", or with a colon
                new = re.sub(r"\b(treetop(?:_debug)?(?:\.\w+)+)(:[\w.]+)?", lambda m: dotted_names(m, names), new)
            new = sub_words(family, path, new)
        else:
            if raw in ("(", "[", "{"):
                calls.append((previous if raw == "(" and previous and re.fullmatch(r"\w+", previous) else "", 0))
            elif raw in (")", "]", "}") and calls:
                calls.pop()
            elif raw == "," and calls:
                calls[-1] = (calls[-1][0], calls[-1][1] + 1)
            if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                previous = raw
            continue
        if token.type != tokenize.COMMENT:
            previous = raw
        if new != raw:
            edits.append((a, b, new))
    for a, b, new in reversed(edits):
        source = source[:a] + new + source[b:]
    for old, new in modules.items():
        source = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, source)
    return source


def rewrap(source):
    """Docstrings and whole-line comments that have grown too long."""
    if all(len(line) <= LIMIT for line in source.splitlines()):
        return source
    lines = source.splitlines()
    spans = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        first, last = token.start[0] - 1, token.end[0]
        if token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""') and not lines[first][: token.start[1]].strip(" r"):
            spans.append((first, last, False))
        elif token.type == tokenize.COMMENT and not lines[first][: token.start[1]].strip():
            if spans and spans[-1][2] and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], last, True)
            else:
                spans.append((first, last, True))
    inside = {i for first, last, _ in spans for i in range(first, last)}
    for i, line in enumerate(lines):  # lists of arguments that are not formatted
        if len(line) > LIMIT and i not in inside and not re.search("[\"'#]", line) and line.rstrip().endswith(","):
            cut = line.rfind(", ", 0, LIMIT + 1) + 1
            lines[i] = line[:cut] + "\0" + line[: len(line) - len(line.lstrip())] + line[cut:].lstrip()
    for first, last, is_comment in reversed(spans):
        if any(len(line) > LIMIT for line in lines[first:last]):
            lines[first:last] = wrapped(lines[first:last], is_comment)
    return "\n".join(lines).replace("\0", "\n") + "\n"


def apply(family):
    print(family.name, flush=True)
    files, moved, modules, paths = tracked(), {}, {}, {}
    for old, new in family.moves.items():
        if not Path(old).exists():
            complain(f"{family.name}: no {old}")
            continue
        if Path(new).exists():
            raise Missing(f"{family.name}: {new} is there already")
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
        moved[old] = new
        paths[old] = new
        if old.endswith(".py") and old.startswith("src/"):
            dotted = [p.removeprefix("src/").removesuffix(".py").replace("/", ".") for p in (old, new)]
            modules[dotted[0]] = dotted[1]
        elif old.endswith(".py") and old.startswith("tests/"):
            dotted = [p.removeprefix("tests/").removesuffix(".py").replace("/", ".") for p in (old, new)]
            modules[dotted[0]] = dotted[1]
    files = [moved.get(f, f) for f in files]
    everything, seen, found = {}, set(), set()
    groups = [(family.names, ["*"], [])] + [(*g, []) if len(g) == 2 else g for g in family.scoped]
    olds = [name for names, *_ in groups for name in names]
    need = [rf"(?<!\w){re.escape(n)}(?!\w)" for n in olds]
    optional = [re.escape(m.rsplit(".", 1)[1]) for m in modules] + [Path(p).name.replace(".", r"\.") for p in paths]
    need += [rule[0] for rule in family.words]
    checked = len(need)
    need += [rule[1] for rule in family.code] + optional
    quick = [re.compile(n, re.MULTILINE) for n in need]
    likely = grepped(need)
    for path in files:
        suffix = Path(path).suffix
        if (suffix not in TEXT and suffix != ".py" and Path(path).name not in ("Makefile", "Dockerfile")) or matches(path, NEVER):
            continue
        if path not in likely:
            continue
        source = Path(path).read_text(encoding="utf-8")
        hits = [i for i, q in enumerate(quick) if q.search(source)]
        if not hits:
            continue
        seen.update(hits)
        kept = matches(path, family.keep)
        names = {}
        for group, globs, but in groups:
            if kept or matches(path, but):
                continue
            if globs[0].startswith("from:"):  # those that a file has from this module, or that it is
                names |= {a: b for a, b in group.items() if comes_from(globs[0][5:], a, path, source)}
            elif matches(path, globs):
                names |= group
        new = source
        if suffix == ".py":
            new = rename_python(family if not kept else Family("", ""), path, new, names, modules)
            tokens = set(re.findall(r"\w+", source))
            clash = [b for a, b in names.items() if a in tokens and b in tokens and re.search(rf"(?<![\w\".`]){re.escape(a)}(?!\w)", source) and re.search(rf"^[^#\"]*(?<![\w\".`]){re.escape(b)}(?!\w)", source, re.MULTILINE)]
            if clash:
                print(f"  note: {path} had {clash} already", file=sys.stderr)
        else:
            text = text_names(family, names)
            if text:
                new = words_of(text).sub(lambda m: text[m[1]], new)
            # plain names in backticks of pages
            if names and suffix == ".md":
                p = words_of(names)
                new = re.sub(r"`([^`\n]+)`", lambda m: "`" + p.sub(lambda n: names[n[1]], m[1]) + "`", new)
            for old, other in modules.items():
                new = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", other, new)
                if old.count(".") > 1:
                    new = re.sub(rf"(?<![\w.]){re.escape(old.removeprefix('treetop.'))}(?!\w)(?!\.(?:py|md|json))", other.removeprefix("treetop."), new)
            new = sub_words(family, path, new) if not kept else new
        for old, other in paths.items():
            for shown, then in ((old, other), (old.removeprefix("src/treetop/"), other.removeprefix("src/treetop/")),
                                (old.removeprefix("src/"), other.removeprefix("src/")),
                                (old.removeprefix("tests/"), other.removeprefix("tests/"))):
                new = re.sub(rf"(?<![\w]){re.escape(shown)}(?!\w)", then, new)
            base, then = Path(old).name, Path(other).name
            if base != then and Path(old).stem not in ("values", "layered"):
                new = re.sub(rf"(?<![\w/.-]){re.escape(base)}(?!\w)", then, new)
        for glob, regex, repl in family.code:
            if fnmatch(path, glob):
                new, count = re.subn(regex, repl, new, flags=re.MULTILINE)
                if count:
                    found.add(regex)
        if new != source:
            everything[path] = new
    if family.expect:
        for n in [n for i, n in enumerate(need[:checked]) if i not in seen] + [r[1] for r in family.code if r[1] not in found]:
            complain(f"{family.name}: nothing matches {n}")
    for path, new in everything.items():
        Path(path).write_text(new, encoding="utf-8")
    python = [p for p in everything if p.endswith(".py")]
    if python:
        subprocess.run([RUFF, "check", "-q", "--fix", "--select", "I,RUF022", *python], check=False)
        subprocess.run([RUFF, "format", "-q", *python], check=True)
        again = []
        for path in python:
            source = Path(path).read_text(encoding="utf-8")
            new = rewrap(source)
            if new != source:
                Path(path).write_text(new, encoding="utf-8")
                again.append(path)
        if again:
            subprocess.run([RUFF, "format", "-q", *again], check=True)
        out = subprocess.run([RUFF, "check", "--output-format", "concise", *python], capture_output=True, text=True)
        if out.returncode:
            print(out.stdout, file=sys.stderr)
            if not LENIENT:
                raise Missing(f"{family.name}: ruff")
    if family.reference:
        env = {**os.environ, "PYTHONPATH": str(Path("src").resolve())}
        subprocess.run([PYTHON, "scripts/reference.py"], check=True, env=env, stdout=subprocess.DEVNULL)
    if not git("status", "--porcelain", "--untracked-files=no").strip():
        print("  nothing to do")
        return
    if os.environ.get("WORDS_NO_COMMIT") != "1":
        git("commit", "-q", "-a", "-m", family.message)
        print(" ", git("show", "--shortstat", "--format=", "HEAD").strip())


def main():
    chosen = sys.argv[1:]
    for spec in FAMILIES:
        family = Family(**spec)
        if not chosen or family.name in chosen:
            apply(family)


if __name__ == "__main__":
    main()
