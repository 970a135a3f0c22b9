"""Finding plugins; broken and clashing ones harm nobody; the docs follow a new defense."""

import importlib.util
import py_compile
import tomllib
from pathlib import Path

import pytest

from bench.registry import Registry, discover, snake_case
from tests.test_docs import hooks

MINE = '''
from bench.contract.attack import Attack, Reconstruction
from bench.contract.defense import Defense

class MyNoise(Defense):
    """Adds nothing yet."""
    def __init__(self, *, std: float = 1.0) -> None:
        self.std = std

class MyAttack(Attack):
    """Guesses."""
    recovers = frozenset({"counts"})
'''


def test_installed_plugins_are_those_of_the_entry_points(registry: Registry) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for kind in ("defense", "attack"):
        named = project["entry-points"][f"leakbench.{kind}s"]
        assert registry.names(kind) == sorted(named)  # type: ignore[arg-type]
        for name, place in named.items():
            assert registry.usable[kind, name].origin.startswith(place)  # type: ignore[index]
    assert registry.broken == []
    assert all(p.summary for p in registry.usable.values())


def test_a_file_brings_its_plugins_under_snake_case_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    plugins = discover((path,))
    assert "my_noise" in plugins.names("defense")
    assert "my_attack" in plugins.names("attack")
    assert plugins.defense("my_noise", {"std": 2}).std == 2  # type: ignore[attr-defined]
    assert snake_case("DPCutMix") == "dp_cut_mix"


def test_a_clashing_name_is_listed_and_the_first_kept(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "clash.py"
    path.write_text("from bench.api import Defense\nclass Spm(Defense):\n    '''Mine.'''\n")
    plugins = discover((path,))
    assert plugins.usable["defense", "spm"].cls is registry.usable["defense", "spm"].cls
    (clash,) = plugins.broken
    assert clash.name == "spm"
    assert "the name is taken by defenses.spm" in str(clash.broken)


def test_files_without_plugins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such plugin file"):
        discover((tmp_path / "none.py",))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="defines no subclass"):
        discover((tmp_path / "empty.py",))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("spmm", {}, r"Unknown defense 'spmm' in s\.toml\. Did you mean 'spm'\?"),
        ("spm", {"epsilonn": 1.0}, r"Did you mean 'epsilon'"),
        ("spm", {"epsilon": True}, r"setting epsilon .* got True"),
        ("spm", {"epsilon": 1.0, "variant": "best"}, r"setting variant .* got 'best'"),
        ("gaussian+none", {"clip_norm": 1.0}, r"must be written MEMBER\.key"),
        ("none+none", {}, r"names 'none' twice"),
    ],
)
def test_wrong_settings_get_one_clear_sentence(
    registry: Registry, name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        registry.defense(name, settings, where="s.toml")


@pytest.mark.parametrize("masks", ["pm_sfl", "splitfed_pm"])
@pytest.mark.parametrize(
    ("noise", "settings"),
    [("gaussian", {"noise_multiplier": 0.1, "clip_norm": 1.0}), ("spm", {"epsilon": 1.0})],
)
def test_noise_goes_before_the_sampling_of_bits(
    registry: Registry, masks: str, noise: str, settings: dict[str, float]
) -> None:
    given = {f"{noise}.{k}": v for k, v in settings.items()}
    with pytest.raises(ValueError, match=f"combine them as '{noise}\\+{masks}'"):
        registry.defense(f"{masks}+{noise}", given)
    registry.defense(f"{noise}+{masks}", given)


def test_defenses_compose_by_name(registry: Registry) -> None:
    both = registry.defense(
        "gaussian+spm",
        {"gaussian.noise_multiplier": 0.1, "gaussian.clip_norm": 1, "spm.epsilon": 1.0},
    )
    assert len(both.mechanisms()) == 3


def test_a_compiled_file_beside_a_plugin_is_neither_run_nor_written(tmp_path: Path) -> None:
    source, hidden = tmp_path / "mine.py", tmp_path / "hidden.py"
    source.write_text(MINE)
    hidden.write_text(MINE + "\nraise SystemExit('hidden code ran')\n")
    compiled = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(
        str(hidden), str(compiled), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    assert ("defense", "my_noise") in discover((source,)).usable
    compiled.unlink()
    discover((source,))
    assert not compiled.exists()


NEW = '''
from bench.api import Defense

class Whisper(Defense):
    """Uploads as they are, quietly.

    Args:
        volume: How loud, in [0, 1].
    """
    def __init__(self, *, volume: float, echo: int = 2) -> None:
        self.volume, self.echo = volume, echo
'''


def test_a_defense_without_a_page_gets_a_section_from_its_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hooks.others(["defenses"], "").strip() == ""  # all that ship have a page
    path = tmp_path / "whisper.py"
    path.write_text(NEW)
    plugins = discover((path,))
    monkeypatch.setattr(hooks, "registry", lambda: plugins)
    assert hooks.page_of("whisper") == "index.md#whisper"
    section = hooks.others(["defenses"], "")
    assert section.startswith("## whisper\n")
    assert "volume: How loud, in [0, 1]." in section
    assert "| `volume` | number | required |" in section
    assert (
        "| `echo` | whole number | `2` |" in section or "| `echo` | whole number | 2 |" in section
    )
