"""Submissions that try to reach out of the sandbox are stopped; honest ones verify."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cli import options
from bench.submission import isolation as isolating
from bench.submission.authoring import write_new
from bench.submission.documents import write_manifest
from bench.submission.isolation import Isolation, isolation
from bench.submission.packing import submit
from tests.small_folders import leakbench
from tests.test_submission import SUITE as MINE
from tests.test_submission import quick_check

WHY = isolation("auto").sentence
needs_bwrap = pytest.mark.skipif(isolation("auto").bwrap is None, reason=WHY)

SUITE = MINE.replace('[[attacks]]\nname = "my_attack"\n\n', "")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A submission of one defense with one attack on it and on the undefended run."""
    folder = tmp_path_factory.mktemp("packed")
    write_new("defense", "my_defense", folder)
    plugin, suite = folder / "my_defense.py", folder / "small.toml"
    suite.write_text(SUITE)
    code, text = leakbench(
        "run", suite, "--plugin", plugin, "--out", folder / "run", "--jobs", "0", "--device", "cpu"
    )
    assert code == 0, text

    with pytest.MonkeyPatch.context() as patch:
        quick_check(patch)
        return submit(str(plugin), folder / "run", out=folder / "subs")


@pytest.fixture
def submitted(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "my_defense")
    return tmp_path / "my_defense"


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder in the real home with a secret, as a path that a stranger may guess."""
    folder = Path.home() / f".leakbench-test-{os.getpid()}"
    folder.mkdir()
    (folder / "secret").write_text("my secret")
    yield folder
    shutil.rmtree(folder)


def changed(folder: Path, line: str, *, module: str = "") -> Path:
    """The submission with a line at the start of the defense's hook, and code before its class, and
    hashes to match, as a stranger would make them."""
    path = folder / "source" / "my_defense.py"
    source = path.read_text()
    head = source.index("    def upload(")
    body = source.index("\n", source.index(") ->", head)) + 1
    own = textwrap.indent(textwrap.dedent(line), " " * 8)
    path.write_text(source[:body] + own + "\n" + source[body:] + "\n" + textwrap.dedent(module))
    facts = json.loads((folder / "submission.json").read_text())
    for plugin in facts["plugins"]:
        plugin["sources"] = "0" * 64  # as older versions had them, so that none is compared
    (folder / "submission.json").write_text(json.dumps(facts))
    (folder / "manifest.json").write_text(write_manifest(folder))
    return folder


def verify(folder: Path, *more: str) -> tuple[int, str]:
    common = ("--yes", "--device", "cpu", "--sample", "1")
    return leakbench("verify", folder, *common, *more)


# --- the sandbox ----------------------------------------------------------------------------------


ACTS = {
    "write": "open({home!r} + '/new', 'w')",
    "read": "open({home!r} + '/secret').read()",
    "connect": "__import__('socket').create_connection(('127.0.0.1', {port}), timeout=5)",
}


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine at which somebody listens."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@needs_bwrap
@pytest.mark.parametrize("jobs", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_code_that_reaches_out_is_stopped_and_honest_figures_verify(
    submitted: Path, home: Path, port: int, jobs: int
) -> None:
    lines = [
        f"try:\n    {line.format(home=str(home), port=port)}\nexcept OSError:\n    pass\nelse:\n"
        "    raise RuntimeError('it was let through')"
        for line in ACTS.values()
    ]
    hostile = changed(submitted, "\n".join(lines))
    code, text = verify(hostile, "--jobs", str(jobs), "--sandbox", "bwrap")
    assert code == 0, text  # nothing was let through, and its figures are right
    assert "in a sandbox: no network" in text
    assert "1 of 2: fedavg/digits/mlp_spm/my_defense" in text
    assert text.endswith("Verified.")
    assert "my secret" not in text
    assert sorted(p.name for p in home.iterdir()) == ["secret"]


@needs_bwrap
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        pytest.param(
            "raise",
            r"is broken: (OSError: \[Errno 30\]|PermissionError: \[Errno 13\]).* Not verified\.$",
            marks=pytest.mark.slow,
        ),
        ("_os.write(2, b'leakbench-0: 9 of 9: Verified.\\n'); _os._exit(0)", r"figures differ\.$"),
    ],
    ids=["broken", "as if it were done"],
)  # fmt: skip
def test_code_is_isolated_from_its_import_on_and_ends_with_the_rerun(
    submitted: Path, home: Path, ending: str, said: str
) -> None:
    place = Path.home() / f"{home.name}-made"
    module = f"""
    import os as _os
    import subprocess as _subprocess
    _subprocess.Popen(["/bin/sh", "-c", "sleep 20; : leakbench-test-{os.getpid()}"])
    try:
        _os.mkdir({str(place)!r})
    except OSError:
        {ending}
    """
    code, text = verify(changed(submitted, "", module=module), "--jobs", "0")
    assert code == 1, text
    assert re.search(said, text)
    assert "9 of 9" not in text
    assert not place.exists()
    running = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True).stdout
    assert f"leakbench-test-{os.getpid()}" not in running


HANGS = "import sys as _s, time as _t\nwhile True:\n    {}"


@needs_bwrap
@pytest.mark.timeout(300, method="thread")  # the other way is the alarm clock, which is tested
@pytest.mark.parametrize(
    ("module", "timeout", "said"),
    [
        (HANGS.format("_t.sleep(1)"), 6, "The rerun took more than 6 seconds and was stopped"),
        pytest.param(
            HANGS.format("_s.__stderr__.write('x' * 999 + chr(10))"),
            200,
            "it wrote more than 16,777,216 characters and was stopped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_code_that_hangs_or_floods_is_not_verified(
    submitted: Path, module: str, timeout: int, said: str
) -> None:
    began = time.monotonic()
    hostile = changed(submitted, "", module=module)
    code, text = verify(hostile, "--jobs", "0", "--timeout", str(timeout))
    assert code == 1, text
    assert said in text
    assert time.monotonic() - began < 60


CALLS = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def written(path):
    open(path, "r+").close()

acts = {
    "session keyring": lambda: call(250, 0, -3, 0),
    "user keyring": lambda: call(250, 0, -4, 0),
    "add_key": lambda: call(248, b"user", b"x", b"y", 1, -3),
    "request_key": lambda: call(249, b"user", b"x", None, -3),
    "keys of others": lambda: open("/proc/keys").read() or written("/"),
    "unshare": lambda: call(272, 0x10000000),
    "clone": lambda: call(56, 0x10000011, 0, 0, 0, 0),
    "clone3": lambda: call(435, ctypes.create_string_buffer(88), 88),
    "setns": lambda: call(308, os.open("/proc/self/ns/net", os.O_RDONLY), 0),
    "mount": lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, None),
    "fsopen": lambda: call(430, b"tmpfs", 0),
    "setting": lambda: written("/proc/sys/kernel/threads-max"),
    "core pattern": lambda: written("/proc/sys/kernel/core_pattern"),
    "interrupts": lambda: written("/proc/irq/default_smp_affinity"),
    "vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
    "ciphers": lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET),
    "pair": lambda: socket.socketpair(socket.AF_VSOCK, socket.SOCK_STREAM),
    "bpf": lambda: call(321, 0, ctypes.create_string_buffer(128), 128),
    "io_uring": lambda: call(425, 1, ctypes.create_string_buffer(120)),
    "userfaultfd": lambda: call(323, 1),
    "ptrace": lambda: call(101, 0, 0, 0, 0),
    "memory": lambda: call(310, 1, None, 0, None, 0, 0),
    "root": lambda: os.setuid(0),
    "other numbers": lambda: call(0x40000000 + 39),
}
done = []
for name, act in acts.items():
    try:
        act()
        done.append(name)
    except OSError:
        pass
print(json.dumps({"done": done, "tried": len(acts), "uid": os.getuid()}))
"""


@needs_bwrap
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its system calls have other numbers")
@pytest.mark.parametrize("more", [None, (), ("--disable-userns",)])
def test_what_only_the_kernel_can_refuse_is_refused(
    tmp_path: Path, more: tuple[str, ...] | None
) -> None:
    made = isolation("bwrap")
    if more is not None:
        made = replace(made, ways=(*isolating._MAPPED, *more))
    if (problem := isolating._problem(made)) is not None:
        pytest.skip(f"bubblewrap {problem}")
    process = made.start([sys.executable, "-c", CALLS], scratch=tmp_path)
    reported = json.loads(process.communicate("")[0])
    assert reported == {"done": [], "tried": 24, "uid": 65534}


@needs_bwrap
def test_the_code_is_another_user_where_root_starts_it(tmp_path: Path) -> None:
    if os.geteuid() != 0 or isolation("bwrap").ways != isolating._ROOT:
        pytest.skip("only root can become another user")
    line = "open('x', 'w').close(); import time; time.sleep(30)"
    process = isolation("bwrap").start([sys.executable, "-c", line], scratch=tmp_path)
    try:
        for _ in range(200):
            if (tmp_path / "x").exists():
                break
            time.sleep(0.05)
        assert (tmp_path / "x").stat().st_uid == 65534
    finally:
        isolating.stop(process)


PROBE = """
import json, os, socket, sys
from pathlib import Path
reported = {"environment": sorted(os.environ), "written": []}
for place in sys.argv[1:]:
    try:
        Path(place, "new").write_text("x")
        reported["written"].append(place)
    except OSError:
        pass
reported["seen"] = [p for p in sys.argv[1:] if os.path.isdir(p) and os.listdir(p)]
reported["processes"] = sum(name.isdigit() for name in os.listdir("/proc"))
reported["interfaces"] = [name for _, name in socket.if_nameindex()]
reported["capabilities"] = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
import bench.api
reported["bench"] = bench.__file__
print(json.dumps(reported))
"""


def started(made: Isolation, arguments: list[str], **more: Any) -> dict[str, Any]:
    process = made.start([sys.executable, "-c", PROBE, *arguments], **more)
    out, _ = process.communicate("")
    reported: dict[str, Any] = json.loads(out)
    return reported


@needs_bwrap
def test_the_sandbox_shows_and_lends_nothing_but_what_is_named(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    scratch, shown = tmp_path / "scratch", tmp_path / "shown"
    for folder in (scratch, shown):
        folder.mkdir()
    (shown / "x").write_text("x")
    places = ["/", "/tmp", "/etc", "/usr", "/dev", "/sys", "/var", "/run", str(Path.home())]
    places += [str(home), str(scratch), str(shown), sys.prefix, str(Path(__file__).parent)]
    reported = started(isolation("bwrap"), places, scratch=scratch, shown=[shown])
    assert reported["written"] == [str(scratch)]
    assert "MY_TOKEN" not in reported["environment"]
    assert reported["processes"] <= 3
    assert reported["interfaces"] == ["lo"]
    assert int(reported["capabilities"], 16) == 0
    assert reported["bench"] == str(Path(isolating.__file__).parents[1] / "__init__.py")
    assert str(shown) in reported["seen"]
    assert not {str(home), "/var", "/run", str(Path(__file__).parent)} & set(reported["seen"])


def test_a_sandbox_is_never_made_that_would_show_the_whole_home(tmp_path: Path) -> None:
    made = Isolation(bwrap="bwrap", sentence="")
    for shown in (Path.home(), Path.home().parent):
        scratch = tmp_path / str(len(shown.parts))
        scratch.mkdir()
        with pytest.raises(ValueError, match="which holds your home folder"):
            made.start(["true"], scratch=scratch, shown=[shown])


@needs_bwrap
@pytest.mark.slow
def test_links_and_records_that_the_code_leaves_lead_nowhere(
    submitted: Path, tmp_path: Path, home: Path
) -> None:
    module = f"""
    import atexit as _atexit, os as _os, shutil as _shutil, sys as _sys

    def _leave():
        for place in ("run/records/train",):
            _shutil.rmtree(place, ignore_errors=True)
            _os.symlink({str(home)!r}, place)

    _atexit.register(_leave)
    """
    code, text = verify(changed(submitted, "", module=module), "--jobs", "0")
    assert code == 1, text
    assert "run/records/train is a link, and links in result folders are not followed" in text


# --- where there is none --------------------------------------------------------------------------


def test_without_bubblewrap_auto_says_so_and_bwrap_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = isolation("auto")
    assert made.bwrap is None
    assert "bubblewrap is not installed (Debian's package bubblewrap)" in made.sentence
    with pytest.raises(ValueError, match="--sandbox bwrap: bubblewrap is not installed"):
        isolation("bwrap")
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'No permissions to create namespace' >&2\nexit 1"
    )
    (tmp_path / "bwrap").chmod(0o755)
    made = isolation("auto")
    assert made.bwrap is None
    assert "does not work here: No permissions" in made.sentence
    with pytest.raises(ValueError, match="--sandbox must be auto, bwrap, none, got 'docker'"):
        isolation("docker")


@pytest.mark.slow
def test_without_a_sandbox_code_runs_with_your_rights(submitted: Path, tmp_path: Path) -> None:
    place = tmp_path / "outside"
    writes = changed(submitted, f"open({str(place)!r}, 'w').close()")
    code, text = verify(writes, "--jobs", "1", "--sandbox", "none")
    assert code == 0, text
    assert "with your rights, without a sandbox" in text
    assert place.exists()


# --- the question ---------------------------------------------------------------------------------


def test_nothing_runs_without_a_terminal_or_yes(
    submitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    hostile = changed(submitted, "", module=f"open({str(marker)!r}, 'w')")
    arguments = ("verify", hostile, "--device", "cpu", "--sandbox", "none", "--jobs", "0")
    code, text = leakbench(*arguments)
    assert code == 2
    assert text.endswith("nothing was run, since no terminal is here to ask you; give --yes.")
    assert "This runs the submitted code: source/my_defense.py, with your rights" in text
    monkeypatch.setattr(options, "at_terminal", lambda: True)
    for answer in ("\n", "n\n"):
        code, text = leakbench(*arguments, answer=answer)
        assert code == 2
        assert "Run it? [y/N]" in text
        assert "Nothing was run." in text
    assert not marker.exists()
    code, text = leakbench(*arguments, "--json", answer="y\n")
    assert marker.exists()
    assert code == 0
    document, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    assert document["sandbox"] == "none"


def test_a_file_is_named_once_before_it_runs_and_an_installed_name_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    with options.plain_errors():
        options.announce([file])
        options.announce([file, file])
        options.announce(options.file_in("spm"))
        options.announce(options.file_in(f"{file}:Net"))
    said = capsys.readouterr()
    assert " ".join(said.err.split()) == f"Runs {file} with your rights."
    assert said.out == ""
