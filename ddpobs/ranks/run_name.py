"""Name of a run that nobody named: the launcher's, otherwise the script's name with the time.

A restart under the same launcher gets the same name, so that it becomes an attempt of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddpobs.wire.text import as_run_id

_INTERACTIVE = frozenset({"", "interactive", "bash", "sh", "zsh", "fish", "wrap"})
"""Names that Slurm gives a job in which a person may start one training after another."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
"""Run id that torchrun draws for `--standalone`."""
_KUBEFLOW = re.compile(r"(.+)-(?:master|worker|chief|launcher)-\d+", re.ASCII)
_POD_SUFFIX = re.compile(r"(.+)-[bcdfghjklmnpqrstvwxz2456789]{5}", re.ASCII)
"""Suffix that Kubernetes draws for the pods of a job (alphabet of its `SafeEncodeString`)."""


def run_name(environ: Mapping[str, str] | None = None) -> str:
    """Return a name for a run whose settings have none.

    Args:
        environ: The process's environment.
    """
    environ = os.environ if environ is None else environ
    return launcher_run_name(environ) or _from_script(environ)


def launcher_run_name(environ: Mapping[str, str]) -> str | None:
    """Return the name that the launcher gives a run; None without a launcher, or if it gives none."""
    chosen = _chosen_rendezvous_id(environ)
    job = _slurm_job(environ) or _kubernetes_job(environ) or _ray_job(environ) or _lsf_job(environ)
    if job and chosen and chosen not in job:
        job = f"{job}-{chosen}"  # Several trainings may run in one job.
    name = job or chosen
    return as_run_id(name) if name else None


def _chosen_rendezvous_id(environ: Mapping[str, str]) -> str | None:
    """Return torchrun's `--rdzv-id` where a person set it: neither torchrun's default nor the UUID that it draws."""
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if run in ("", "none") or _UUID.fullmatch(run) else run


def _slurm_job(environ: Mapping[str, str]) -> str | None:
    """Return name and id of a Slurm batch job, which keeps both when it is requeued.

    The task of an array has the array's id and its index. A job step after the first adds its number, because steps may
    run beside each other.
    """
    name, job = environ.get("SLURM_JOB_NAME", ""), environ.get("SLURM_JOB_ID", "")
    if not job or name in _INTERACTIVE:
        return None
    if task := environ.get("SLURM_ARRAY_TASK_ID"):
        job = f"{environ.get('SLURM_ARRAY_JOB_ID', job)}_{task}"
    step = environ.get("SLURM_STEP_ID", "0")
    return f"{name}-{job}" + (f".{step}" if step.isdecimal() and step != "0" else "")


def _kubernetes_job(environ: Mapping[str, str]) -> str | None:
    """Return the job of a pod from the pod's name: Kubeflow's, an indexed job's, or a plain job's."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    pod = environ.get("HOSTNAME") or socket.gethostname()
    if match := _KUBEFLOW.fullmatch(pod):
        return match[1]
    if index := environ.get("JOB_COMPLETION_INDEX"):
        pod = _POD_SUFFIX.sub(r"\1", pod) if not pod.endswith(f"-{index}") else pod
        return pod.removesuffix(f"-{index}")
    match = _POD_SUFFIX.fullmatch(pod)
    return match[1] if match else None


def _ray_job(environ: Mapping[str, str]) -> str | None:
    """Return the submission id of a Ray job; `RAY_JOB_ID` alone begins again with each cluster."""
    with suppress(ValueError, TypeError, AttributeError):
        metadata = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("metadata", {})
        name = metadata.get("job_submission_id") or metadata.get("job_name")
        return str(name) if name else None
    return None


def _lsf_job(environ: Mapping[str, str]) -> str | None:
    job, name = environ.get("LSB_JOBID"), environ.get("LSB_JOBNAME", "")
    if not job:
        return None
    index = environ.get("LSB_JOBINDEX", "0")
    job += f"_{index}" if index != "0" else ""
    return "-".join(filter(None, (name.partition("[")[0], job)))


def _from_script(environ: Mapping[str, str]) -> str:
    """Return the script's name with a time and six hexadecimal digits.

    Under torchrun both belong to its agent, which starts the ranks again after a failure. Otherwise each call returns
    another name.
    """
    began_s, digits = time.time(), secrets.token_hex(3)
    if "TORCHELASTIC_RUN_ID" in environ and (ticks := _start_ticks(os.getppid())) is not None:
        began_s = _boot_s() + ticks / os.sysconf("SC_CLK_TCK")
        agent = f"{socket.gethostname()} {environ['TORCHELASTIC_RUN_ID']} {os.getppid()} {ticks} {_boot_s()}"
        digits = hashlib.sha256(agent.encode()).hexdigest()[:6]
    return as_run_id(f"{_script()[:64]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(began_s))}-{digits}")


def _script() -> str:
    """Return the name of the script or module that the process runs."""
    path = Path(sys.argv[0] if sys.argv else "")
    if path.stem == "__main__":
        path = path.parent
    return path.stem if path.stem not in ("", "-c", "-m") else "python"


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None where /proc does not have it."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _boot_s() -> int:
    """Return the Unix time of the boot, in seconds. It is constant unless the clock is set."""
    try:
        return int(Path("/proc/stat").read_text().partition("\nbtime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0
