# SPDX-License-Identifier: BSD-3-Clause
"""What the children of the template tests run: Python that comes over their socket.

The first message is the pid. Then a line with a JSON string of code, answered by a line with what the code calls
``result``, as JSON (it may write to ``end`` itself); code that sets ``code`` has ``main`` return that.
"""

from __future__ import annotations

import json
import os
import socket
import warnings

# as torch does where numpy is missing: the trainer has been told, and the user is not told again
warnings.warn("this module is imported", stacklevel=1)


def main(end: socket.socket) -> int:
    stream = end.makefile("rw")
    print(os.getpid(), file=stream, flush=True)
    names: dict[str, object] = {"end": end}
    for line in stream:
        exec(json.loads(line), names)
        if "code" in names:
            return int(str(names["code"]))
        print(json.dumps(names.get("result")), file=stream, flush=True)
    return 0
