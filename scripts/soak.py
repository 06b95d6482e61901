"""A long run at random: nothing leaks, fires or changes. In three forms:

    python scripts/soak.py engine --rounds 20000 --seed 0
    python scripts/soak.py roles --rounds 20000 [--threads]
    python scripts/soak.py kills --seconds 600 [--kind tp --device cuda --graphs auto]

engine: the embedded pair in this process. roles: ranks that share experts prefill for ranks that share experts. kills:
the same as servers over HTTP, whose processes are struck. `soak.py FORM --help` says more.

At the end nothing may be held, and a part of the finished requests gets the same tokens from one engine that has seen
nothing, but for near ties in float32. Prints one JSON object; exit code 1 if anything failed, 2 for an option that
cannot work.
"""

import argparse
import json
import sys
from typing import Any

from soaks import engine, kills, roles
from soaks.common import TINY, check_least

from treetop.cli import OneLineParser, exit_code
from treetop.types.config import EngineConfig
from treetop.types.options import options_of

FORMS = {"engine": engine, "roles": roles, "kills": kills}
WORKERS = {"device": "cpu", "graphs": "sim", "page_size": 4, "context_length": 160}
DEFAULTS: dict[str, dict[str, Any]] = {
    "engine": {"device": "auto", "graphs": "auto", "page_size": 16, "context_length": 256, "sample": 64},
    "roles": {**WORKERS, "dtype": "float64", "sample": 64},
    "kills": {**WORKERS, "sample": 200},
}
LEAST = (("sample", 0), ("context_length", 16))
"""16 tokens: what random prompts need room for."""


def parser_of() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    forms = parser.add_subparsers(dest="form", required=True, metavar="engine|roles|kills")
    table = options_of(EngineConfig)
    for name, form in FORMS.items():
        one = forms.add_parser(name, description=form.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = one.add_argument
        add("--seed", type=int, default=0)
        add("--sample", type=int, help="requests that a fresh engine answers again; of kills beside those struck")
        add("--device", choices=table["device"].choices if name == "engine" else ("cpu", "cuda"))
        add("--dtype", default="float32", choices=("float32", "float64"), help="what equality is defined in")
        add("--graphs", choices=table["graphs"].choices)
        add("--check-level", type=int, default=2)
        add("--page-size", type=int)
        add("--context-length", type=int)
        if name == "engine":
            add("--attention-backend", default="auto", choices=table["attention_backend"].choices)
            add("--kv-offloading-size", type=float, metavar="GIB", help="of the tier on the host, on a CPU too")
            add("--disable-radix-cache", action="store_true", help="keep no pages for prompts that repeat")
        else:
            add("--ranks", type=int, default=2, help="of each worker")
            add("--model", metavar="FOLDER", help="one with experts and an MTP layer")
            add("--tiny", default="glm-4.5", choices=sorted(TINY), help="the model without --model")
            add("--speculative", default="3,2,6", metavar="S,K,T", help="of the model's MTP layer")
            add("--slot-bytes", type=int, default=1 << 18, help="of each of four staging slots")
        if name in ("engine", "roles"):
            add("--rounds", type=int, default=20_000)
        if name == "roles":
            add("--seconds", type=float, default=float("inf"), help="end this part early")
            add("--threads", action="store_true", help="ranks are threads of this process, on a CPU")
            add("--listen", default="127.0.0.1:23456", metavar="HOST:PORT", help="of the first prefill rank")
        if name == "kills":
            add("--seconds", type=float, default=600.0, help="of requests and strikes")
            add("--every", type=float, default=8.0, metavar="S", help="seconds between two strikes, about")
            add("--stopped-seconds", type=float, default=4.0, metavar="S", help="most that a process is stopped")
            add("--clients", type=int, default=8, help="requests at a time")
            add("--kind", default="ep", choices=sorted(kills.RANKS), help="what ranks share: experts, or a model")
        one.set_defaults(**DEFAULTS[name])
    return parser


def run(args: argparse.Namespace) -> int:
    """Soak, compare, print. Raises UserError for options that cannot work."""
    form = FORMS[args.form]
    check_least(args, (*form.LEAST, *LEAST))
    found = form.run(args)
    print(json.dumps(found))
    return int(bool(found["failures"]))


def main() -> int:
    args = parser_of().parse_args()
    return exit_code("soak", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
