"""`leakbench ledger --paper`: what the five papers print, and what holds of it."""

from __future__ import annotations
