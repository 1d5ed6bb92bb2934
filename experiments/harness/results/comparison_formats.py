"""One HTML page of several runs: scores, curves, samples side by side, settings that differ."""

import html
from collections.abc import Sequence

from experiments.harness.results import html_parts, tables
from experiments.harness.results.comparing import baseline_first, compare
from experiments.harness.results.groups import Group, expand, group_runs, settings_of
from experiments.harness.results.plots import Curve
from experiments.harness.results.report import curve, logged_names
from experiments.harness.results.scored_runs import sample_table
from experiments.harness.runs.run_folder import Run
from jaxformer.errors import ConfigError, DataError

_SAMPLES = 12


def page(paths: Sequence[str], metric: str = "", baseline: str = "") -> str:
    """The page of the runs in `paths` (see `compare`); what cannot be compared is said why."""
    groups = baseline_first(group_runs(expand(paths, finished=True)), baseline)
    sections = {
        "Scores": _scores(paths, metric, baseline),
        "Curves": _curves(groups),
        "Samples": f'<div class="scroll samples">{html_parts.table(_samples(groups))}</div>',
        "Settings that differ": html_parts.table(_differing(groups)),
        "Runs": html_parts.table(_runs(groups)),
    }
    return html_parts.page(f"{len(groups)} variants", sections)


def _scores(paths: Sequence[str], metric: str, baseline: str) -> str:
    try:
        found = compare(paths, metric, baseline)
    except (ConfigError, DataError) as error:
        return f"<p><strong>The scores cannot be compared: {html.escape(str(error))}</strong></p>"
    drawn = [tables.group_table(found)]
    drawn += [tables.difference_table(found)] if found.differences else []
    notes = [*tables.warnings(found), *tables.describe(found)]
    return "".join(
        html_parts.table(dict(zip(titles, zip(*rows, strict=True), strict=True)))
        for titles, rows in drawn
    ) + "".join(f"<p>{html.escape(note)}</p>" for note in notes)


def _curves(groups: Sequence[Group]) -> str:
    """A chart of each number that some run logged, a line for each group with a band of seeds."""
    metrics = {folder: Run(folder).metrics() for group in groups for folder in group.folders}
    names = dict.fromkeys(name for lines in metrics.values() for name in logged_names(lines))
    charts = []
    for name in names:
        lines: dict[str, list[Curve]] = {
            group.name: [
                curve(name, metrics[folder])
                for folder in group.folders
                if name in logged_names(metrics[folder])
            ]
            for group in groups
        }
        charts.append(html_parts.chart(name, {key: found for key, found in lines.items() if found}))
    return (
        html_parts.legend([f"{group.name} ({len(group.folders)} runs)" for group in groups])
        + f'<div class="charts">{"".join(charts)}</div>'
    )


def _samples(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Source, reference, and what the first run of each group makes of it; {} if texts differ."""
    found = {group.name: sample_table(group.folders[0]) for group in groups}
    found = {name: samples for name, samples in found.items() if "model" in samples}
    if not found or len({tuple(samples["reference"]) for samples in found.values()}) > 1:
        return {}
    first = next(iter(found.values()))
    columns = {"source": first["source"], "reference": first["reference"]}
    columns |= {name: samples["model"] for name, samples in found.items()}
    return {name: column[:_SAMPLES] for name, column in columns.items()}


def _differing(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings that are not the same for all groups: a column for each of them."""
    settings = {group.name: settings_of(group.folders[0]) for group in groups}
    names = sorted({name for values in settings.values() for name in values} - {"name"})
    names = [n for n in names if len({values.get(n) for values in settings.values()}) > 1]
    if not names:
        return {}
    columns = {
        group: [values.get(n, "absent") for n in names] for group, values in settings.items()
    }
    return {"setting": names} | columns


def _runs(groups: Sequence[Group]) -> dict[str, list[str]]:
    pairs = [(group, folder) for group in groups for folder in group.folders]
    return {
        "variant": [group.name for group, _ in pairs],
        "seed": [str(seed) for group in groups for seed in group.seeds],
        "folder": [str(folder) for _, folder in pairs],
    }
