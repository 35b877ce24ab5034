"""Whether the server in this container works, for HEALTHCHECK; ends with 0 or 1.

    healthy.py [/readyz]

Asks /healthz, or the path given, at the port of ARCHIPEL_SERVER_PORT (8470), over TLS where
ARCHIPEL_SERVER_TLS_CERTIFICATE is set. The certificate is for the server's name, not for the loopback address, so it is
not checked; nothing secret is sent.
"""

import os
import ssl
import sys
import urllib.request

TIMEOUT_SECONDS = 4

path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
scheme = "https" if os.environ.get("ARCHIPEL_SERVER_TLS_CERTIFICATE") else "http"
url = f"{scheme}://127.0.0.1:{os.environ.get('ARCHIPEL_SERVER_PORT', '8470')}{path}"
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
try:
    urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context)
except OSError as error:
    sys.exit(f"{url}: {error}")
