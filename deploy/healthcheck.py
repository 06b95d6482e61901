"""Whether the server of this container is ready: exit code 0 or 1. HTTPS is asked without looking at the name."""

import os
import ssl
import sys
import urllib.error
import urllib.request


def main() -> int:
    scheme = "https" if os.environ.get("TREETOP_SSL_CERTFILE") else "http"
    context = ssl._create_unverified_context() if scheme == "https" else None
    url = f"{scheme}://127.0.0.1:{os.environ.get('TREETOP_PORT', '8000')}/health/ready"
    try:
        with urllib.request.urlopen(url, timeout=4, context=context):
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
