"""Run folders -> tables, pictures, one page."""

from fedem.report.page import build_page
from fedem.report.pictures import FIGURES
from fedem.report.pictures.canvas import alone, paint
from fedem.report.runs import gather

__all__ = ["FIGURES", "alone", "build_page", "gather", "paint"]
