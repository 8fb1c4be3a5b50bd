"""How a page looks: in the light and in the dark, on a phone and on paper."""

from __future__ import annotations

from fedem.report.figures import COLOURS

# The same hues, light enough for a dark ground.
_LIT = (
    "#5aaeea",
    "#ff9d4d",
    "#4fcb94",
    "#ff6f9f",
    "#b09bf2",
    "#cf9a68",
    "#4fd3e6",
    "#e3cf3c",
    "#a9b5be",
    "#f3a3d3",
)


def _variables(colours: tuple[str, ...]) -> str:
    return " ".join(f"--colour-{number}: {colour};" for number, colour in enumerate(colours))


STYLE = f"""
:root {{ --ground: #ffffff; --ink: #20262c; --soft: #5b6770; --grid: #dde2e7; --link: #0b5fa5; {_variables(COLOURS)} }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ --ground: #14181c; --ink: #e6eaee; --soft: #a3afb9; --grid: #343c44; --link: #7cc0f2; {_variables(_LIT)} }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid var(--grid); }}
h3 {{ font-size: 1.05rem; margin: 0; }}
a {{ color: var(--link); }}
header p, caption {{ color: var(--soft); text-align: left; font-size: 0.9rem; }}
nav ul {{ display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; padding: 0; list-style: none; font-size: 0.9rem; }}
figure {{ margin: 2rem 0; }}
.see {{ margin: 0.25rem 0 0.75rem; }}
/* What is wider than the screen is moved under a finger; a shade says so, until its end covers the shade. */
.wide {{ overflow-x: auto; background:
  linear-gradient(var(--ground), var(--ground)) right / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--grid), transparent) right / 1rem 100% no-repeat scroll; }}
.wide svg {{ display: block; max-width: 100%; height: auto; }}
caption {{ max-width: calc(min(100vw, 46rem) - 2rem); }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.3rem 0.6rem 0.3rem 0; text-align: right; vertical-align: bottom;
  border-bottom: 1px solid var(--grid); white-space: nowrap; }}
thead th {{ white-space: normal; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ overflow-x: auto; padding: 0.75rem; border: 1px solid var(--grid); border-radius: 4px; font-size: 0.8rem; }}
summary {{ cursor: pointer; }}
@media print {{
  html {{ font-size: 10pt; }}
  body {{ max-width: none; padding: 0; }}
  nav {{ display: none; }}
  table {{ font-size: 0.8rem; }}
  figure, tr, details {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }}
  .wide {{ overflow: visible; background: none; }}
  .wide svg {{ min-width: 0 !important; max-width: 80%; }}
  td:last-child {{ overflow-wrap: anywhere; white-space: normal; }}
  tr:first-child {{ break-before: avoid; }}
  caption {{ max-width: none; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
  /* Paper can't be opened. */
  details::details-content {{ content-visibility: visible; }}
  details pre {{ columns: 3; font-size: 0.7rem; }}
}}
"""
