"""Whatever a suite, an option, a setting, a fact or a file of data holds: a result, or a sentence.

A few hundred inputs in every run of the tests, thousands with `--hypothesis-profile=many`.
"""

import inspect
import io
import json
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from bench import suite as suites
from bench.cli import app
from bench.contract.events import Facts
from bench.data import load_dataset
from bench.data.dataset import check_dataset
from bench.errors import UserError
from bench.registry import discover
from bench.report.accounts import check_facts
from tests.conftest import part

REGISTRY = discover()
ANY_TIME = settings(deadline=None, suppress_health_check=list(HealthCheck))
VALID: dict[str, Any] = {
    "name": "tiny",
    "version": 1,
    "seeds": [0],
    "checkpoints": ["init"],
    "audit": 0,
    "budget": 2,
    "protocol": {"clients": 4, "rounds": 1, "local_steps": 1, "batch": 2, "lr": 0.1},
    "tasks": [{"dataset": "digits", "model": "logistic"}],
    "threats": [{"name": "server", "victims": 2}],
    "defenses": [{"name": "none"}, {"name": "spm", "settings": {"epsilon": [0.5, 2.0]}}],
    "attacks": [{"name": "prior_only"}],
}
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 10**6, 10**12, 10**400, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf")]
)
TEXTS = st.sampled_from(
    ["", "x", "../x", "/etc/x", "none", "init", "round-2", "[red]x[/nope]", "\x1b[2J", "a" * 5000]
) | st.text(max_size=20)
SCALARS = NUMBERS | TEXTS | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2)
)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that a document holds."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A suite that is spoilt at up to three places: another value, a key too many or too few."""
    made: dict[str, Any] = json.loads(json.dumps(VALID))
    for _ in range(draw(st.integers(0, 3))):
        known = list(places(made))
        if not known:
            break
        *way, key = draw(st.sampled_from(known))
        room: Any = made
        for step in way:
            room = room[step]
        change = draw(st.sampled_from(["value", "drop", "more", "again"]))
        if change == "value":
            room[key] = draw(VALUES)
        elif change == "drop":
            del room[key]
        elif isinstance(room, dict):
            near = st.just(f"{key}s" if isinstance(key, str) else "key")
            room[draw(TEXTS | near)] = draw(VALUES)
        else:
            room.append(room[key] if change == "again" else draw(VALUES))
    return made


def sentence(error: UserError) -> str:
    """What a UserError tells, which ends and is no page."""
    text = str(error)
    assert text.endswith((".", "?")), text
    assert len(text) < 50_000
    return text


# --- suites ---------------------------------------------------------------------------------------


@given(document=documents())
@ANY_TIME
def test_a_spoilt_suite_is_a_suite_or_a_sentence(document: dict[str, Any]) -> None:
    try:
        made = suites.suite_of(document, "x.toml")
    except UserError as error:
        sentence(error)
    else:
        again = suites.suite_of(made.model_dump(), "x.toml")
        assert again == made


TOML = st.binary(max_size=60) | st.sampled_from(
    [
        b"\xef\xbb\xbfname = 1",
        b"name = 1\0",
        b"version = 2020-01-01",
        b"x = [{at = 07:32:00}]",
        b"# \xff",
        "name = 1".encode("utf-16"),
        b"x = " + b"[" * 1000 + b"]" * 1000,
        b"x = " + b"[" * 100_000,
        b"a" + b".a" * 1000 + b" = 1",
        b"x = " + b"{a = " * 1000,
        b"version = " + b"9" * 5000,
        b'name = "\\ud800"',
        b"version = 1\nversion = 2",
        b"protocol = 1\n[protocol]",
        b"tasks = [1]\nthreats = {}\ndefenses = 'x'",
    ]
)


def test_a_suite_may_begin_with_a_byte_order_mark_and_holds_no_dates(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    text = (files("bench") / "suites" / "quick.toml").read_text()
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert suites.read_suite(str(path)) == suites.read_suite("quick")
    path.write_text(f"{text}\n[[defenses]]\nname = 'spm'\nsettings = {{epsilon = 2020-01-01}}\n")
    with pytest.raises(UserError, match=r"2020-01-01 is a date or a time, which must stand in"):
        suites.read_suite(str(path))
    assert suites.parse_value("2020-01-01") == "2020-01-01"


@given(text=TOML)
@ANY_TIME
def test_a_file_that_is_no_suite_is_a_sentence(
    text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(text)
    with pytest.raises(UserError) as refused:
        suites.read_suite(str(path))
    sentence(refused.value)


PATHS = [
    "seeds", "version", "name", "protocol.lr", "protocol", "tasks.0.model", "tasks.²", "a.b", ".",
    "threat.victims", "threat.x", "defenses.0.settings.epsilon", "tasks.9", "x.0",
]  # fmt: skip
OVERRIDES = st.builds(
    "{}={}".format,
    st.sampled_from(PATHS) | st.text(max_size=8),
    st.sampled_from(["[true]", "true", "inf", "[" * 3000, "1\nx = 2", "9" * 5000, "[]", "'"])
    | VALUES.map(str),
)


@given(override=OVERRIDES)
@ANY_TIME
def test_an_override_is_a_suite_or_a_sentence(override: str) -> None:
    try:
        assert suites.read_suite("quick", [override]).name
    except UserError as error:
        sentence(error)


def test_all_that_is_wrong_with_a_suite_is_told_in_one_go() -> None:
    document = VALID | {"version": True, "seeds": [True], "seedz": [0], "budget": 10**12}
    document["protocol"] = {"rounds": -1, "rouds": 2, "lr": float("inf"), "local_steps": 1}
    document["defenses"] = [{"name": "spm", "settings": {"epsilon": []}}]
    with pytest.raises(UserError) as told:
        suites.suite_of(document, "x.toml")
    for words in ("version:", "seeds.0:", "'seedz'. Did you mean 'seeds'?", "budget:",
                  "protocol.rounds:", "'protocol.rouds'. Did you mean 'rounds'?", "protocol.lr:",
                  "setting epsilon lists no value"):  # fmt: skip
        assert words in str(told.value), words
    fitting = VALID | {"checkpoints": ["init", "init", "round-9"], "seeds": [1, 1]}
    fitting["threats"] = [{"victims": 9}]
    fitting["attacks"] = [{"name": "idlg"}, {"name": "dlg", "threat": "x", "tasks": [5]}]
    with pytest.raises(UserError) as told:
        suites.suite_of(fitting, "x.toml")
    for words in ("init is named twice", "round-9 lies beyond", "1 is named twice in seeds",
                  "observes 9 victims", "Unknown threat 'x'", "to run on task 5"):  # fmt: skip
        assert words in str(told.value), words


# --- settings and facts ---------------------------------------------------------------------------


@st.composite
def plugins(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    kind = draw(st.sampled_from(["defense", "attack"]))
    name = draw(st.sampled_from(REGISTRY.names(kind)))  # type: ignore[arg-type]
    cls = REGISTRY.get(kind, name).cls  # type: ignore[arg-type]
    assert cls is not None
    known = [*inspect.signature(cls).parameters, "epsilom"]
    return kind, name, draw(st.dictionaries(st.sampled_from(known), VALUES, max_size=4))


@given(case=plugins())
@ANY_TIME
def test_settings_make_a_plugin_or_a_sentence(case: tuple[str, str, dict[str, Any]]) -> None:
    kind, name, given_ = case
    make: Callable[..., Any] = getattr(REGISTRY, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a plugin's own words
        try:
            make(name, given_)
        except UserError as error:
            sentence(error)


@given(facts=st.dictionaries(st.sampled_from([*(f.name for f in fields(Facts)), "x"]), SCALARS))
@ANY_TIME
def test_facts_are_facts_or_a_sentence(facts: dict[str, Any]) -> None:
    try:
        assert check_facts({"parameters": 10} | facts).parameters >= 1
    except UserError as error:
        sentence(error)


# --- data -----------------------------------------------------------------------------------------


LABELS = np.arange(60) % 3
ARRAYS: dict[str, np.ndarray] = {
    "train_images": np.random.default_rng(0).integers(0, 256, (60, 16, 16), dtype=np.uint8),
    "train_labels": LABELS,
    "test_images": np.zeros((12, 16, 16), np.uint8),
    "test_labels": LABELS[:12],
}
SPOILERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "huge": lambda a: np.where(np.arange(a.size).reshape(a.shape) == 0, 10**12, a.astype(int)),
    "negative": lambda a: a.astype(int) - 1,
    "float": lambda a: a.astype(float),
    "nan": lambda a: a * np.nan,
    "complex": lambda a: a.astype(complex),
    "text": lambda a: a.astype(str),
    "bool": lambda a: a > 0,
    "object": lambda a: a.astype(object),
    "scalar": lambda a: np.array(3),
    "empty": lambda a: a[:0],
    "shorter": lambda a: a[1:],
    "flat": lambda a: a.reshape(len(a), -1),
    "deeper": lambda a: a[..., None],
    "one value": lambda a: a * 0,
    "no sides": lambda a: a[..., :0],
    "small": lambda a: a[..., :10],
    "unsigned": lambda a: (a.astype(np.int64) - 1).astype(np.uint64),
}
HEADERS = [
    b"", b"hello", b"\x93NUMPY\x09\x00\x00\x00", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f",
    b"\x93NUMPY\x01\x00\x46\x00{'descr': '|u1', 'fortran_order': False, 'shape': (10**12, 16)} ",
    b"\x93NUMPY\x01\x00\x50\x00"
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 16, 16)}".ljust(79)
    + b"\n",
    b"\x93NUMPY\x01\x00\x50\x00"
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 16, 16)}".ljust(79) + b"\n",
    b"\x93NUMPY\x01\x00\x50\x00"
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (60,)}".ljust(79) + b"\n",
]  # fmt: skip


def packed(arrays: dict[str, np.ndarray], raw: dict[str, bytes]) -> bytes:
    """An npz file of arrays, and of members that are these bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            one = io.BytesIO()
            np.save(one, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", raw.get(name, one.getvalue()))
    return file.getvalue()


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    arrays, raw = dict(ARRAYS), {}
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(ARRAYS)))
        how = draw(st.sampled_from(["spoil", "spoil", "header", "drop"]))
        if how == "spoil":
            spoiler = SPOILERS[draw(st.sampled_from(sorted(SPOILERS)))]
            arrays[name] = spoiler(ARRAYS[name])
        elif how == "header":
            raw[name] = draw(st.sampled_from(HEADERS))
        else:
            arrays.pop(name, None)
    return damaged(draw, packed(arrays, raw))


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content itself, cut short, or with some bytes changed."""
    how = draw(st.sampled_from(["whole", "whole", "cut", "flips"]))
    if how == "cut":
        return content[: draw(st.integers(0, len(content)))]
    spoilt = bytearray(content)
    if how == "flips":
        for place in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5)):
            spoilt[place] ^= draw(st.integers(1, 255))
    return bytes(spoilt)


def data_or_sentence(name: str, options: dict[str, Any]) -> None:
    began = time.process_time()
    try:
        check_dataset(load_dataset(name, seed=0, options=options), what="it")
    except UserError as error:
        sentence(error)
    assert time.process_time() - began < 20


SIZES = st.sampled_from([{}, {}, {}, {"size": 12}, {"size": 10**12}, {"size": "a"}, {"size": 0}])


@given(content=archives(), options=SIZES)
@ANY_TIME
def test_an_npz_file_is_data_or_a_sentence(
    content: bytes, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(content)
    data_or_sentence(f"npz:{path}", options)


@cache
def picture(mode: str, side: int, kind: str) -> bytes:
    """The bytes of an image file."""
    depth = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}.get(mode)
    rng = np.random.default_rng(0)
    if mode == "I;16":
        made = Image.fromarray(rng.integers(0, 2**16, (side, side), dtype=np.uint16))
    elif mode == "F":
        made = Image.fromarray(rng.random((side, side), dtype=np.float32))
    elif depth is None:
        made = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).convert(mode)
    else:
        pixels = rng.integers(0, 256, (side, side, depth), dtype=np.uint8)
        made = Image.frombytes(mode, (side, side), pixels.tobytes())
    file = io.BytesIO()
    made.save(file, kind)
    return file.getvalue()


KINDS = [
    ("L", "PNG"), ("LA", "PNG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG"),
    ("I;16", "PNG"), ("I;16", "TIFF"), ("F", "TIFF"), ("CMYK", "JPEG"), ("RGB", "JPEG"),
    ("RGB", "BMP"), ("P", "GIF"), ("RGBA", "WEBP"), ("L", "PPM"), ("CMYK", "TIFF"),
]  # fmt: skip


@st.composite
def images(draw: st.DrawFn) -> bytes:
    mode, kind = draw(st.sampled_from(KINDS))
    content = picture(mode, draw(st.sampled_from([1, 16, 20])), kind)
    return damaged(draw, content) if draw(st.integers(0, 3)) else draw(st.binary(max_size=40))


OPTIONS = SIZES.flatmap(
    lambda size: st.sampled_from([size, size | {"gray": True}, size | {"gray": "no"}])
)


@given(content=images(), options=OPTIONS)
@ANY_TIME
def test_a_folder_with_any_image_is_data_or_a_sentence(
    content: bytes, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two classes of five images, one of which has this content."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    for number in range(10):
        file = folder / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture("RGB", 16, "PNG") if number else content)
    data_or_sentence(f"folder:{folder}", options)


# --- all commands ---------------------------------------------------------------------------------


WORDS = st.sampled_from(
    ["nan", "inf", "-1", "0", "1", "1e-300", "1e308", "1000000000000", "9" * 400, "true", "x", "",
     "[]", "[" * 3000, "a=b", "epsilon=nan", "noise_multiplier=[]", "seeds=[true]", "=", "a=",
     "version=true", "batch=10,records=5,parameters=1", "defense=none,gausian", "../x", "a" * 5000,
     "[red]x[/nope]", "\x1b[2J", "²", "none", "spm", "gaussian", "dlg", "none+none", "TINY",
     "NOWHERE", "EMPTY"]
)  # fmt: skip
FIRST = {
    "run": ["TINY", "--jobs", "0"],
    "plan": ["TINY"],
    "sweep": ["TINY", "--jobs", "0", "--over", "protocol.rounds=1,nan"],
    "tune": ["TINY", "--jobs", "0", "--steps", "0"],
    "audit": ["spm", "--set", "epsilon=1.0", "--draws", "100"],
    "ledger": ["spm", "--set", "epsilon=1.0"],
    "new": ["defense", "mine"],
    "check": ["none", "--fast", "--set", "x=1"],
    "submit": ["none", "--run", "EMPTY"],
    "verify": ["EMPTY"],
    "report": ["EMPTY"],
    "compare": ["EMPTY", "none", "spm"],
    "site": ["EMPTY", "--out", "made"],
    "merge": ["EMPTY", "--out", "made"],
    "attack": ["NOWHERE"],
    "export": ["EMPTY", "x", "--out", "made"],
    "score": ["EMPTY", "x", "NOWHERE"],
}
"""What a command is given before the fuzzed arguments, so that these are reached."""
LEFT_OUT = {"--help", "--download", "--device"}


def commands() -> dict[str, list[tuple[str, bool]]]:
    """The options of every command, and whether each is a flag."""
    group: Any = typer.main.get_command(app)
    return {
        name: [
            (p.opts[0], bool(getattr(p, "is_flag", False)))
            for p in command.params
            if p.opts[0].startswith("--") and p.opts[0] not in LEFT_OUT
        ]
        for name, command in group.commands.items()
    }


@st.composite
def calls(draw: st.DrawFn) -> list[str]:
    known = commands()
    name = draw(st.sampled_from(sorted(known)))
    before = FIRST.get(name, []) if draw(st.integers(0, 4)) else []
    arguments = [name, *before]
    for _ in range(draw(st.integers(0, 2))):
        if known[name] and draw(st.integers(0, 3)):
            option, flag = draw(st.sampled_from(known[name]))
            arguments += [option] if flag else [f"{option}={draw(WORDS)}"]
        else:
            arguments.append(draw(WORDS))
    return arguments


def test_every_command_is_fuzzed() -> None:
    assert FIRST.keys() <= commands().keys()
    assert all(options for name, options in commands().items() if name in FIRST)


@pytest.mark.timeout(7200)
@given(arguments=calls())
@settings(ANY_TIME, max_examples=part(10))
def test_a_command_ends_in_a_result_or_a_sentence(
    arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = tmp_path_factory.mktemp("call")
    (here / "empty").mkdir()
    (here / "tiny.toml").write_text(
        "".join(f"{k} = {suites.to_toml(v, k)}\n" for k, v in VALID.items())
    )
    names = {"TINY": "tiny.toml", "NOWHERE": "nowhere", "EMPTY": "empty"}
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        done = CliRunner().invoke(app, [names.get(a, a) for a in arguments], input="n\n")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        pytest.fail("".join(traceback.format_exception(done.exception)))
    assert done.exit_code in (0, 1, 2), done.output
    if done.exit_code == 2 and "Usage" not in done.output:
        assert done.stderr.splitlines()[-1].startswith("leakbench: ")
    assert time.monotonic() - began < 60
