"""Run folders -> tables."""

from __future__ import annotations
