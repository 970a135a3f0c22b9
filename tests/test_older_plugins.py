"""What plugins and their tests were told to import by earlier versions is still there."""

from __future__ import annotations

import bench.api
from bench.conformance.attacks import context, scenes
from bench.conformance.plugins import check_plugins
from bench.privacy import events
from bench.sandbox.conformance import attacks, plugins


def test_events_and_mechanisms_are_found_under_their_earlier_name() -> None:
    for name in events.__all__:
        assert getattr(events, name) is getattr(bench.api, name), name


def test_a_plugins_own_test_finds_what_it_is_checked_with() -> None:
    assert check_plugins is plugins.check_plugins
    assert (context, scenes) == (attacks.context, attacks.scenes)
