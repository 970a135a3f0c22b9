"""What the code of strangers may reach while it runs: a sandbox of bubblewrap, where there is one.

`bwrap` makes a process that sees only the files it is shown, has no network, and cannot gain
rights. Its own flags say what that is; https://github.com/containers/bubblewrap. A filter refuses
the system calls that such a process does not need (`bench.submission.seccomp`).
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from bench.errors import UserError
from bench.names import DATASETS, GROUPS, MODELS
from bench.registry import JUDGES
from bench.submission import seccomp
from bench.toolkit.processes import KEEP_MEMORY

SANDBOXES = ("auto", "bwrap", "none")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_DETAILS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
            "/etc/localtime", "/sys")  # fmt: skip
"""Which libraries there are, the time zone, and what the hardware can do, which libraries ask."""
_ALONE = (
    "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
    "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
)  # fmt: skip
_NOBODY = 65534
"""User and group of the code."""
_MAPPED = ("--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY))
"""Who may not become another user is called one: outside it stays the caller."""
_ROOT = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""Root becomes that user, inside, by `_BECOME`: it would own what the kernel lets only root write.
"""
_BECOME = (
    f"import os, sys; os.setgroups([]); os.setgid({_NOBODY}); os.setuid({_NOBODY}); "
    "os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
)
_JOIN = (
    "import ctypes, os, sys; ctypes.CDLL(None).syscall(int(sys.argv[1]), 1, None); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""Begins a new session keyring (KEYCTL_JOIN_SESSION_KEYRING): the caller's holds its secrets."""
_KERNEL = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi")
"""Settings of the machine, which root may write."""
_KEYS = ("/proc/keys", "/proc/key-users", "/proc/kcore", "/proc/sysrq-trigger")
_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Variables that a sandbox has as they are outside."""
_PROBE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """How a command is run.

    Attributes:
        bwrap: The program that isolates it; None to run it as it is.
        ways: What that program is told of users and their namespaces.
        sentence: What that means, after "This runs the code".
    """

    bwrap: str | None = None
    ways: tuple[str, ...] = _MAPPED
    sentence: str = "with your rights, without a sandbox"

    def start(
        self,
        command: Sequence[str],
        *,
        scratch: Path,
        shown: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
        device: str = "cpu",
        output: IO[bytes] | int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command of this Python. It leads a process group of its own; see `stop`.

        Args:
            command: What is run.
            scratch: The only folder in which it may write; its working directory. Temporary files
                and caches of libraries go to `scratch`/tmp.
            shown: Files and folders that it may read beside Python and the system's libraries.
            hidden: Folders that are empty in a sandbox, though they lie in one that it sees.
            device: With cuda, the GPUs' device files are there.
            output: Where standard output and error go.

        Raises:
            UserError: If what it must see holds the home folder.
        """
        (scratch / "tmp").mkdir()
        before: Sequence[str] = ()
        handles: list[int] = []
        if self.bwrap is not None:
            before = self._sandbox(scratch, shown, hidden, device)
            if (rules := seccomp.program()) is not None:
                handles = [os.memfd_create("rules")]
                os.write(handles[0], rules)
                os.lseek(handles[0], 0, os.SEEK_SET)
                own = [sys.executable, "-IS", "-c", _JOIN, str(seccomp.keyctl_number())]
                before = [*own, before[0], "--seccomp", str(handles[0]), *before[1:]]
        try:
            return subprocess.Popen(
                [*before, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                cwd=scratch,
                env=self._variables(scratch / "tmp"),
                pass_fds=handles,
                start_new_session=True,
            )
        finally:
            for handle in handles:
                os.close(handle)

    def _variables(self, temporary: Path) -> dict[str, str]:
        """The environment variables: in a sandbox none that might hold a secret."""
        own = {
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(temporary),
            "XDG_CONFIG_HOME": str(temporary),
            "PYTHONPATH": os.pathsep.join(_import_path()),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            **KEEP_MEMORY,
        }
        if self.bwrap is None:
            return {**os.environ, **own}
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "LOGNAME": "user", **kept, **own}

    def _sandbox(
        self, scratch: Path, shown: Sequence[Path], hidden: Sequence[Path], device: str
    ) -> list[str]:
        """What stands before a command that it isolates."""
        assert self.bwrap is not None
        ways = self.ways
        read = [p for path in shown for p in (path, *path.glob("*"))]
        if ways == _ROOT and not all(p.stat().st_mode & 0o004 for p in read if p.exists()):
            ways = _MAPPED  # what only its owner may read, another user cannot run
        made = [self.bwrap, *_ALONE, *ways, "--tmpfs", "/"]
        visible = _visible(shown)
        inside = (*map(Path, _SYSTEM), *map(Path, _DETAILS), *visible, scratch, Path.home() / "x")
        # Made by name: on its own, bubblewrap makes folders for the caller only.
        above = {p for path in inside for p in path.parents if p != Path("/")}
        made += [a for p in sorted(above) for a in ("--dir", str(p))]
        for system in map(Path, _SYSTEM):
            if system.is_symlink():
                made += ["--symlink", str(system.readlink()), str(system)]
            elif system.exists():
                made += ["--ro-bind", str(system), str(system)]
        made += [a for p in _DETAILS for a in ("--ro-bind-try", p, p)]
        made += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm"]
        made += [a for p in _KERNEL if Path(p).exists() for a in ("--ro-bind", p, p)]
        made += [a for p in _KEYS if Path(p).exists() for a in ("--ro-bind", "/dev/null", p)]
        if device.startswith("cuda"):
            nodes = map(str, sorted(Path("/dev").glob("nvidia*")))
            made += [a for p in nodes for a in ("--dev-bind", p, p)]
        made += [a for p in map(str, visible) for a in ("--ro-bind", p, p)]
        made += [a for p in hidden for a in ("--tmpfs", str(p))]
        made += ["--bind", str(scratch), str(scratch), "--remount-ro", "/dev", "--remount-ro", "/"]
        if ways != _ROOT:
            return [*made, "--chdir", str(scratch), "--"]
        for folder, _, files in os.walk(scratch):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
        return [*made, "--", sys.executable, "-IS", "-c", _BECOME, str(scratch)]


def stop(process: subprocess.Popen[str]) -> None:
    """End a process that `Isolation.start` gave, with those that it started; in a sandbox all of
    them, whatever they did."""
    if process.returncode is None:  # once it was waited for, its number may be another's
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def isolation(sandbox: str) -> Isolation:
    """The isolation of a name of SANDBOXES.

    Raises UserError for another name, and for bwrap where it is missing or does not work.
    """
    if sandbox not in SANDBOXES:
        raise UserError(f"--sandbox must be {', '.join(SANDBOXES)}, got '{sandbox}'.")
    if sandbox == "none":
        return Isolation()
    program = shutil.which("bwrap")
    problem: str | None = "is not installed"
    without = "" if seccomp.program() else ", and no filter of system calls, for want of one for "
    sentence = (
        "in a sandbox: no network, nothing of your home folder but what Python and the data need, "
        f"nothing writable but a temporary folder{without and without + platform.machine()}"
    )
    if program is not None:
        nested = ((*_MAPPED, "--disable-userns"), _MAPPED)  # the first is younger
        for ways in (_ROOT, *nested) if os.geteuid() == 0 else nested:
            made = Isolation(bwrap=program, ways=ways, sentence=sentence)
            if (problem := _problem(made)) is None:
                return made
    if sandbox == "bwrap":
        raise UserError(f"--sandbox bwrap: bubblewrap {problem} (Debian's package bubblewrap).")
    why = f"since bubblewrap {problem} (Debian's package bubblewrap)"
    return Isolation(sentence=f"{Isolation.sentence}, {why}")


def _problem(made: Isolation) -> str | None:
    """Why it cannot isolate here, found by trying; None if it can."""
    with tempfile.TemporaryDirectory(prefix="leakbench-") as scratch:
        process = made.start([sys.executable, "-c", "import bench"], scratch=Path(scratch))
        try:
            text, _ = process.communicate(timeout=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"does not work here: {error}"
        finally:
            stop(process)
    if process.returncode == 0:
        return None
    said = " ".join(text.split())[:200] or f"it ended with {process.returncode}"
    return f"does not work here: {said}"


def _visible(shown: Sequence[Path]) -> list[Path]:
    """What a Python process needs to see beside the system, outer folders first, each once."""
    visible: list[Path] = []
    own = {Path(p) for p in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)}
    home = Path.home().resolve()
    libraries = _list_folders("LD_LIBRARY_PATH")
    needed = {*own, *libraries, *_packages(), *_import_folders(), *_links(), *shown}
    for path in sorted(needed):
        if home.is_relative_to(path.resolve()):
            raise UserError(
                f"the sandbox would have to show {path}, which holds your home folder: move it "
                "into a folder of its own, or give --sandbox none."
            )
        system = any(path.is_relative_to(s) for s in _SYSTEM)
        if path.exists() and not system and not any(path.is_relative_to(f) for f in visible):
            visible.append(path)
    return visible


def _packages() -> Iterator[Path]:
    """Folders of the packages that bring plugins, models and data sets, leakbench's own too; found
    without importing them."""
    groups = (*GROUPS.values(), MODELS, DATASETS, JUDGES)
    points = [p for group in groups for p in entry_points(group=group)]
    for top in sorted({"bench", *(p.module.partition(".")[0] for p in points)}):
        spec = find_spec(top)
        if spec is not None and spec.submodule_search_locations is not None:
            yield from map(Path, spec.submodule_search_locations)
        elif spec is not None and spec.origin is not None:
            yield Path(spec.origin)


def _import_folders() -> Iterator[Path]:
    """Folders of installed packages outside the environment, and those that PYTHONPATH names."""
    yield from _list_folders("PYTHONPATH")
    for name in sys.path:
        if os.path.basename(name) in ("site-packages", "dist-packages"):
            yield Path(name).absolute()


def _list_folders(variable: str) -> Iterator[Path]:
    """The folders that an environment variable lists, but for such as hold the home folder."""
    home = Path.home().resolve()
    for name in filter(None, os.environ.get(variable, "").split(os.pathsep)):
        path = Path(name).absolute()
        if not home.is_relative_to(path.resolve()):
            yield path


def _import_path() -> list[str]:
    """Where modules are looked for, but in the environment, which has its own way: the parents of
    the packages too, which hold nothing else in a sandbox."""
    parents = [str(p.parent) for p in _packages()]
    known = [str(Path(p).absolute()) for p in sys.path]
    inside = (sys.prefix, sys.base_prefix)
    paths = dict.fromkeys([*(k for k in known if k in parents), *map(str, _import_folders())])
    return [p for p in paths if not p.startswith(inside)]


def _links() -> Iterator[Path]:
    """The links by which the environment's python leads to the program."""
    path = Path(sys.executable)
    while path.is_symlink():
        path = path.parent / path.readlink()
        yield Path(os.path.abspath(path))
