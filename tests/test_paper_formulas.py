"""`leakbench ledger --paper`: what the five papers print, and what holds of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.contract.events import Facts, Formula
from bench.registry import Registry
