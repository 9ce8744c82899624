"""The last commit on this host's disk, from which the next attempt of torchrun's goes on.

Horovod's survivors of a failure keep their memory. torchrun ends all ranks and starts them anew, so a commit has to
outlive the process. One rank of each host writes it, because any host may be lost.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from ddpobs.errors import HorovodError
from ddpobs.horovod.position import local_rank

_log = logging.getLogger("ddpobs")


class CommitFile:
    """A file with one commit, which is replaced as a whole.

    Args:
        path: The file, in a folder of this user alone: it is unpickled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_this_host(cls, environ: Mapping[str, str] | None = None) -> CommitFile | None:
        """The file of this job on this host; None without torchrun, and on all ranks but the host's first.

        All attempts of a job have the same agent, whose process starts the ranks.
        """
        environ = os.environ if environ is None else environ
        if "TORCHELASTIC_RUN_ID" not in environ or local_rank() != 0:
            return None
        folder = Path(tempfile.gettempdir()) / f"ddpobs-commits-{os.getuid()}"
        return cls(folder / f"{quote(environ['TORCHELASTIC_RUN_ID'], safe='')}-{os.getppid()}")

    def write(self, number: int, saved: Any) -> None:
        """Replace the commit; logs a warning if the disk does not take it."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._check_owner()
            torch.save((number, saved), new)
            new.replace(self._path)
        except (OSError, RuntimeError) as error:  # torch raises a RuntimeError if the disk is full.
            _log.warning("ddpobs: the commit cannot be written for the next attempt to %s: %s", self._path, error)

    def read(self) -> tuple[int, Any] | None:
        """Return the commit's number and content; None if there is none."""
        if not self._path.exists():
            return None
        self._check_owner()
        return torch.load(self._path, map_location="cpu", weights_only=False)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Delete the file, at the end of the training."""
        self._path.unlink(missing_ok=True)

    def _check_owner(self) -> None:
        status = self._path.parent.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise HorovodError(
                f"{self._path.parent} belongs to another user, so that its commits are not loaded: remove it, or set "
                "TMPDIR"
            )
