"""Replicas behind Ray Serve, for the tests in a process of their own:

    python tests/support/ray_driver.py PORT NAME=VALUE ...

stdout: "up" once they serve, "again" after each rolling restart. stdin: a line asks for one; its end ends everything.
"""

import sys

import ray
from ray import serve

from treetop.cli.replicas import app


def main() -> None:
    port, *given = sys.argv[1:]
    values = dict(each.split("=", 1) for each in given)
    ray.init(num_cpus=8, include_dashboard=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(app(values))
    print("up", flush=True)
    while sys.stdin.readline():
        serve.run(app(values))
        print("again", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
