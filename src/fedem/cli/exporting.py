"""``fedem export``: a client's model as files that can be used elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedem.cli.options import Quiet, Which, listed
from fedem.deploy.keeping import Kept
from fedem.deploy.plan import Plan
from fedem.errors import UserError
from fedem.export import FORMATS, Exported, export_client, export_personal
from fedem.report.console import console, waiting, writing
from fedem.result import PersonalModel, Result


def export(
    source: Annotated[
        Path, typer.Argument(help="The folder of a run, or the file that a deployed client keeps.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="A new folder to write to.", show_default=False)],
    client: Annotated[str | None, typer.Option(help="Name of the client whose model is wanted.")] = None,
    components: Annotated[
        bool, typer.Option("--components", help="The components alone, uniformly weighted: nobody's in particular.")
    ] = False,
    formats: Annotated[
        str, typer.Option("--format", help=f"Some of safetensors, {', '.join(FORMATS)}, with commas between.")
    ] = "safetensors",
    which: Which = "last",
    quiet: Quiet = False,
) -> None:
    """Write a client's model to files: to load again, or to use where fedem is not installed.

    Each file is loaded again and compared with the model before it counts as written.
    """
    with waiting("Exporting", quiet), writing(out):
        if source.is_file():
            exported = _of_kept(source, client, components, out, listed(formats))
        else:
            exported = _of_run(source, client, components, out, listed(formats), which)
    if not quiet:
        for name, difference in exported.differences.items():
            said = "the same to the bit" if difference == 0 else f"within {difference:.0e} of the largest prediction"
            console.print(f"{name}: {said}", highlight=False)
    console.print(f"Exported: {out}", soft_wrap=True, highlight=False)
    if exported.refused:
        reasons = "; ".join(f"{name} ({why})" for name, why in exported.refused.items())
        raise UserError(f"{out} was written without the formats that the model does not allow: {reasons}.")


def _of_run(source: Path, client: str | None, components: bool, out: Path, formats: list[str], which: str) -> Exported:
    if (client is None) != components:
        given = "Both --client and --components are" if components else "Neither --client nor --components is"
        raise UserError(f"{given} given; allowed: one of them.")
    return export_client(Result.load(source, device="cpu"), client, out, formats, which)


def _of_kept(source: Path, client: str | None, components: bool, out: Path, formats: list[str]) -> Exported:
    if client is not None or components:
        raise UserError(f"{source} is one client's file; allowed without it: --client and --components.")
    kept = Kept.load(source)
    if kept.shared is None:
        raise UserError(f"{source} has no components: they come to the client when its run is over.")
    # It may have been trained on a device that is not here.
    config = kept.plan.config.replace("run", device="cpu")
    # A server asks for the model that predicts, once the run is over, and then there is one before it.
    if config.run.fine_tune_epochs and kept.before is None:
        raise UserError(
            f"run.fine_tune_epochs is {config.run.fine_tune_epochs}: clients fine-tune on their samples when they "
            f"predict, and {source} is of a peer, which keeps the model before that; allowed for a peer's file: 0."
        )
    parts = Plan(config, kept.plan.shapes).parts
    mixture = parts.algorithm.predictor(kept.shared, kept.personal)
    personal = PersonalModel(parts.model, mixture, kept.plan.shapes)
    return export_personal(
        personal, config, out, formats, {"client": kept.client or None, "state": "last", "round": kept.round}
    )
