"""One run: configuration -> recipe -> rounds -> state -> scores -> a folder and a result."""

from fedem.runs.measures import diagnose

__all__ = ["diagnose"]
