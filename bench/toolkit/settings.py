"""Refusals of a setting's value, one sentence each."""

from bench.contract.settings import Limits, check_choice, check_number

__all__ = ["Limits", "check_choice", "check_number"]
