"""Name of a run that nobody named: the launcher's, otherwise the script's name with the time.

A restart under the same launcher gets the same name, so that it becomes an attempt of the run. It uses the standard
library alone: each rank under `ddpobs run` imports it at its start.
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
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

_INTERACTIVE = frozenset({"", "interactive", "bash", "sh", "zsh", "fish", "wrap"})
"""Names that Slurm gives a job in which a person may start one training after another."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
"""Run id that torchrun draws for `--standalone`."""
_KUBEFLOW = re.compile(r"(.+)-(?:master|worker|chief|launcher)-\d+", re.ASCII)
_POD_SUFFIX = re.compile(r"(.+)-[bcdfghjklmnpqrstvwxz2456789]{5}", re.ASCII)
"""Suffix that Kubernetes draws for the pods of a job (alphabet of its `SafeEncodeString`)."""
_NO_RUN_ID = re.compile(r"[^A-Za-z0-9._-]", re.ASCII)
"""A character that `ddpobs.wire.text.RUN_ID` does not have."""
_PARENT_CHARACTERS = 39
"""The rest of a run id is the name from a script."""
RANKS = "DDPOBS_RANK_PROCESSES"
"""Variable with the ranks above a process and the process itself, outermost first: `PID:START:PLACE:RUN`."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable of torchrun's agent, which has another value for each rank and attempt."""


def as_run_id(text: str) -> str:
    """The nearest run id to a launcher's or a script's name."""
    run = _NO_RUN_ID.sub("-", text)[:128]
    return run if run.strip(".") else f"run{run}"


def run_name(environ: Mapping[str, str] | None = None, launch: str = "", script: str = "") -> str:
    """Return a name for a run whose settings have none.

    Args:
        environ: The process's environment.
        launch: Id of the `ddpobs run`, for a process that ends before its rank agrees on a name with the others.
        script: Name of the script; empty for the one that this process runs.
    """
    environ = os.environ if environ is None else environ
    return launcher_run_name(environ) or _from_script(environ, launch=launch, script=script)


def child_run_name(chosen: str | None, ranks: Mapping[int, str], environ: Mapping[str, str] | None = None) -> str:
    """Return a name for the run of a program that a rank started: the one of its settings, unless it is inherited.

    The launcher's name is inherited too. So the name consists of the parent's run, the script and the time.

    Args:
        chosen: Name in the settings of the program.
        ranks: Runs of the ranks that started it, by process number, the nearest first; empty if not known.
        environ: The process's environment.
    """
    if chosen and chosen not in ranks.values():
        return chosen
    parent = next(filter(None, ranks.values()), "")
    name = _from_script(os.environ if environ is None else environ, above=ranks)
    return as_run_id(f"{parent[:_PARENT_CHARACTERS]}.{name}" if parent else name)


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


def new_launch() -> str:
    """Return an id for a `ddpobs run`: 16 hexadecimal digits that begin with its Unix time."""
    return f"{int(time.time()):08x}{secrets.token_hex(4)}"


def _from_script(environ: Mapping[str, str], above: Collection[int] = (), launch: str = "", script: str = "") -> str:
    """Return the script's name with a time and six hexadecimal digits.

    Under torchrun both belong to its agent, which starts the ranks again after a failure. Otherwise they belong to the
    launch, and without one each call returns another name.

    Args:
        environ: The process's environment.
        above: Ranks that started this process; an agent above one of them is not its own.
        launch: As `run_name`'s.
        script: As `run_name`'s.
    """
    began_s = float(int(launch[:8], 16)) if launch else time.time()
    digits = launch[-6:] or secrets.token_hex(3)
    agent = _agent(environ, above)
    if agent is not None and (ticks := start_ticks(agent)) is not None:
        began_s = _boot_s() + ticks / os.sysconf("SC_CLK_TCK")
        key = f"{socket.gethostname()} {environ['TORCHELASTIC_RUN_ID']} {agent} {ticks} {_boot_s()}"
        digits = hashlib.sha256(key.encode()).hexdigest()[:6]
    return as_run_id(f"{(script or _script())[:64]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(began_s))}-{digits}")


def _agent(environ: Mapping[str, str], above: Collection[int]) -> int | None:
    """Return the process number of torchrun's agent; None without one.

    A program between the agent and the rank, a shell for example, has the rank's environment.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    error_file = environ.get(_ERROR_FILE, "")
    pid: int | None = os.getppid()
    while pid and pid not in above and error_file and _environ_of(pid).get(_ERROR_FILE) == error_file:
        pid = parent_of(pid)
    is_own = not above or (pid and pid not in above and RANKS in _environ_of(pid))
    return pid if is_own else None


def _environ_of(pid: int) -> dict[str, str]:
    """Return the variables with which a process began; empty if they are not readable."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (variable.partition("=") for variable in variables)}


def _script() -> str:
    """Return the name of the script or module that the process runs, also before the interpreter has found it."""
    path = Path(sys.argv[0] if sys.argv else "")
    if path.name == "-m" and "-m" in sys.orig_argv[:-1]:
        return sys.orig_argv[sys.orig_argv.index("-m") + 1].rpartition(".")[2]
    if path.stem == "__main__":
        path = path.parent
    return path.stem if path.stem not in ("", "-c", "-m") else "python"


def parent_of(pid: int) -> int | None:
    """Return the number of a process's parent; None where /proc does not have it."""
    return _field(pid, 1)


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None where /proc does not have it."""
    return _field(pid, 19)


def _field(pid: int, index: int) -> int | None:
    """Return a field of /proc/PID/stat, counted from the state."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[index])
    except (OSError, ValueError, IndexError):
        return None


def _boot_s() -> int:
    """Return the Unix time of the boot, in seconds. It is constant unless the clock is set."""
    try:
        return int(Path("/proc/stat").read_text().partition("\nbtime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0
