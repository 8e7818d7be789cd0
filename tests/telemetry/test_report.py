"""The report: its data by value, its page in a real browser, its PNGs on disk."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openlm_moe.errors import UserError
from openlm_moe.telemetry.report.__main__ import main, write_report
from openlm_moe.telemetry.report.charts import charts, heat_maps, thinned
from openlm_moe.telemetry.report.runs import Run, load_runs
from openlm_moe.telemetry.report.table import table

HERE = Path(__file__).parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = ["moe-8", "dense"]
LAST_TOKENS = 60 * 8192


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A MoE run with layers 0 and 2, and a dense run: 60 steps each, evaluated three times."""
    root, make_run = tmp_path_factory.mktemp("runs"), load("made_runs").make_run
    return [make_run(root / "moe-8", 8, layers=(0, 2), steps=60), make_run(root / "dense", 0, (), steps=60, floor=4.0)]


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> list[Run]:
    return load_runs(folders)


@pytest.fixture(scope="module")
def report(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("report")
    write_report(folders, out, "Two runs")
    return out


def values(folder: Path, name: str) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def last_value(folder: Path, name: str) -> float:
    return values(folder, name)[-1]


# -- data ------------------------------------------------------------------------------------------------------------


def test_thinning_keeps_the_level_and_shows_the_range() -> None:
    points = [(float(i), float(i % 2)) for i in range(1000)]
    middles, band = thinned(points, 100)
    assert len(middles) == len(band) == 100
    assert middles[-1] == points[-1]
    assert all(0.4 < y < 0.6 for _, y in middles[:-1])
    assert all((low, high) == (0.0, 1.0) for _, low, high in band[:-1])
    assert thinned(points[:100], 100) == (points[:100], [])


def test_charts_hold_what_the_runs_logged(runs: list[Run], folders: list[Path]) -> None:
    by_id = {chart.id: chart for chart in charts(runs)}
    loss = {series.label: series for series in by_id["loss"].series}
    assert list(loss) == ["moe-8 train", "dense train", "moe-8 stdlib", "dense stdlib"]
    for name, folder in zip(NAMES, folders, strict=True):
        assert loss[f"{name} train"].points[-1] == (LAST_TOKENS, last_value(folder, "train/loss"))
        assert loss[f"{name} stdlib"].points[-1] == (LAST_TOKENS, last_value(folder, "valid/stdlib/loss"))
        assert len(loss[f"{name} stdlib"].points) == 3
    assert [s.label for s in by_id["balance"].series] == ["moe-8"]
    assert by_id["z_loss"].series == []
    flops = by_id["perplexity_active_flops"].series[0].points[-1]
    assert flops == (pytest.approx(2.4e7 * LAST_TOKENS), pytest.approx(last_value(folders[0], "train/perplexity")))
    minutes = by_id["perplexity_wall_time"]
    assert minutes.x_label == "wall time (min)"
    assert minutes.series[0].points[-1][0] == pytest.approx(60 * 4 / 60, rel=0.02)


def test_the_fall_at_the_start_leaves_the_axis(runs: list[Run]) -> None:
    perplexity = charts(runs)[0]
    first = max(series.points[0][1] for series in perplexity.series)
    assert perplexity.y_top < 0.9 * first


def test_heat_map_is_relative_to_the_mean(runs: list[Run]) -> None:
    first, second = heat_maps(runs, 0)
    assert (first.layer, second.layer) == (0, 2)
    assert first.tokens[-1] == LAST_TOKENS
    for column in first.load:
        assert sum(column) / len(column) == pytest.approx(1.0, abs=1e-3)
    assert max(range(8), key=lambda e: first.load[0][e]) == 0
    assert max(range(8), key=lambda e: second.load[0][e]) == 2


def test_table_of_runs(runs: list[Run], folders: list[Path]) -> None:
    titles, rows = table(runs)
    moe, dense = (dict(zip(titles, row, strict=True)) for row in rows)
    assert moe["run"] == "moe-8"
    assert moe["best valid. perplexity"] == f"{min(values(folders[0], 'valid/stdlib/perplexity')):.2f}"
    assert moe["tokens"] == "492k"
    assert moe["MoE"] == "8 experts, top-2"
    assert moe["parameters, of them active"] == "6.4M / 3.2M"
    assert moe["max/mean load"] == f"{last_value(folders[0], 'experts/max_violation') + 1:.2f}"
    assert dense["MoE"] == "dense"
    assert dense["max/mean load"] == "–"


def test_runs_of_the_same_name_get_their_paths(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "copy")
    names = [run.name for run in load_runs([folders[0], tmp_path / "copy"])]
    assert len(set(names)) == 2


# -- the page in a browser -------------------------------------------------------------------------------------------


FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><pre id="facts"></pre>
<script>
addEventListener("message", (event) => {{ document.getElementById("facts").textContent = event.data; }});
</script>
<iframe src="page.html" width="{width}" height="900" style="border: 0"></iframe>"""


def browse(run: Callable[..., Any], page: Path, width: int, dark: bool, scratch: Path) -> dict[str, Any]:
    """What the browser has drawn (see page_facts.js) in a frame of `width`, and what it complained about.

    A frame, because a browser's window has a least width that is more than a phone's.
    """
    copy, around = scratch / "page.html", scratch / "around.html"
    script = (HERE / "page_facts.js").read_text()
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    around.write_text(FRAME.format(width=width))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions"]
    flags += ["--no-first-run", "--enable-logging=stderr", f"--user-data-dir={scratch / 'profile'}"]
    flags += [
        "--window-size=1400,900",
        "--hide-scrollbars",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    process = run([BROWSER, *flags, "--virtual-time-budget=5000", "--dump-dom", around.as_uri()], timeout=100)
    found = re.search(r'<pre id="facts">(.*?)</pre>', process.stdout, re.S)
    assert found, process.stderr[-3000:]
    facts = json.loads(html.unescape(found[1]))
    facts["complaints"] = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    return facts


@pytest.fixture(scope="module")
def desktop(run: Callable[..., Any], report: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    return browse(run, report / "index.html", 1280, False, tmp_path_factory.mktemp("desktop"))


@pytest.fixture(scope="module")
def phone(run: Callable[..., Any], report: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    return browse(run, report / "index.html", 390, True, tmp_path_factory.mktemp("phone"))


def shown_number(text: str) -> float:
    """'1.5M' -> 1500000.0, '2e16' -> 2e16."""
    suffixes = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    return float(text[:-1]) * suffixes[text[-1]] if text[-1] in suffixes else float(text)


def value_at(ticks: list[list[Any]], place: float, log: bool = False) -> float:
    """The value that an axis with these ticks shows at pixel `place`."""
    (low, a), (high, b) = ((shown_number(t[0]), t[1]) for t in (ticks[0], ticks[-1]))
    share = (place - a) / (b - a)
    return math.exp(math.log(low) + share * math.log(high / low)) if log else low + share * (high - low)


LINES = {
    "perplexity_tokens": ["moe-8 train", "dense train", "moe-8 stdlib", "dense stdlib"],
    "perplexity_wall_time": ["moe-8 train", "dense train", "moe-8 stdlib", "dense stdlib"],
    "perplexity_active_flops": ["moe-8 train", "dense train", "moe-8 stdlib", "dense stdlib"],
    "loss": ["moe-8 train", "dense train", "moe-8 stdlib", "dense stdlib"],
    "balance": ["moe-8"],
    "throughput": ["moe-8", "dense"],
    "mfu": ["moe-8", "dense"],
    "memory": ["moe-8", "dense"],
    "grad_norm": ["moe-8", "dense"],
    "lr": ["moe-8", "dense"],
    "violation": ["moe-8"],
    "entropy_0": ["layer 0", "layer 2"],
}


def test_every_chart_has_lines_legend_axes_and_labels(desktop: dict[str, Any]) -> None:
    assert desktop["complaints"] == []
    assert set(desktop["figures"]) == {*LINES, "heat_0_0", "heat_0_2"}
    for name, labels in LINES.items():
        figure = desktop["figures"][name]
        assert [label for label, _ in figure["lines"]] == labels
        assert all(len(path.split("L")) >= 3 for _, path in figure["lines"])
        assert len(figure["labels"]) == 2 and all(figure["labels"])
        assert len(figure["x"]) >= 3 and len(figure["y"]) >= 3, name
        numbers = [shown_number(t[0]) for t in figure["x"]]
        assert numbers == sorted(set(numbers))
    legend = desktop["figures"]["loss"]["legend"]
    assert legend == ["moe-8", "dense", "train", "validation: stdlib"]
    assert desktop["figures"]["perplexity_tokens"]["labels"] == ["perplexity", "training tokens"]
    assert desktop["notes"] == ["Not logged by any run: Router z-loss.", "0 throughout: Dropped slots."]


def test_lines_end_where_the_runs_ended(desktop: dict[str, Any], folders: list[Path]) -> None:
    for chart, metric, log in (("loss", "train/loss", False), ("perplexity_tokens", "train/perplexity", True)):
        figure = desktop["figures"][chart]
        for (label, path), folder in zip(figure["lines"][:2], folders, strict=True):
            x, y = map(float, path.split("L")[-1].split())
            assert value_at(figure["x"], x) == pytest.approx(LAST_TOKENS, rel=0.01), label
            assert value_at(figure["y"], y + 4, log) == pytest.approx(last_value(folder, metric), rel=0.01), label


def test_heat_map_shows_the_overloaded_expert(desktop: dict[str, Any]) -> None:
    image = pytest.importorskip("PIL.Image")
    for layer in (0, 2):
        figure = desktop["figures"][f"heat_0_{layer}"]
        assert figure["labels"] == ["expert", "training tokens"]
        assert [t[0] for t in figure["y"]] == [str(e) for e in range(8)]
        drawn = image.open(io.BytesIO(base64.b64decode(figure["image"].partition(",")[2]))).convert("RGB")
        redness = []
        for expert in range(8):
            red, _, blue = drawn.getpixel((1, int((expert + 0.5) * drawn.height / 8)))
            redness.append(red - blue)
        assert max(range(8), key=lambda e: redness[e]) == layer
        assert redness[layer] > 150 and sorted(redness)[-2] < 100


def test_table_and_headline(desktop: dict[str, Any], runs: list[Run], folders: list[Path]) -> None:
    titles, rows = table(runs)
    assert desktop["table"] == [titles, *rows]
    reached = values(folders[0], "valid/stdlib/perplexity")
    best = min(reached)
    tokens = {0: "164k", 1: "328k", 2: "492k"}[reached.index(best)]
    assert desktop["headline"] == f"Lowest validation perplexity: {best:.2f} on stdlib, by moe-8 after {tokens} tokens."


def test_legend_hides_lines_and_a_pointer_reads_values(desktop: dict[str, Any], folders: list[Path]) -> None:
    assert desktop["toggle"] == [4, 2, 4]
    last = last_value(folders[1], "valid/stdlib/loss")
    assert any(text.startswith("dense stdlib") and text.endswith(f"{last:.3g}") for text in desktop["tip"])


def test_page_loads_nothing(desktop: dict[str, Any], report: Path) -> None:
    assert desktop["resources"] == []
    page = report.joinpath("index.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}


def test_phone_and_dark(phone: dict[str, Any], desktop: dict[str, Any]) -> None:
    assert phone["complaints"] == []
    assert phone["width"] == 390
    assert phone["overflow"] == 0
    for name, figure in phone["figures"].items():
        assert figure["width"] <= 390, name
        assert figure["font"] >= 12, name
        assert figure["scale"] == pytest.approx(1, abs=0.02), f"{name} was not drawn for this width"
        places = sorted((t[1] - t[2] / 2, t[1] + t[2] / 2) for t in figure["x"])
        assert all(a[1] < b[0] for a, b in pairwise(places)), f"tick labels of {name} overlap"
    dark, light = (sum(map(int, re.findall(r"\d+", facts["background"])[:3])) for facts in (phone, desktop))
    assert dark < 120 and light > 650
    assert sum(map(int, re.findall(r"\d+", phone["ink"])[:3])) > 600


# -- files and command -----------------------------------------------------------------------------------------------


def test_pngs(report: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    names = {path.stem for path in report.glob("*.png")}
    assert names == {*(set(LINES) - {"entropy_0"}), "routing_entropy_moe-8", "expert_load_moe-8"}
    for path in report.glob("*.png"):
        picture = image.open(path).convert("L")
        assert picture.width >= 1000
        assert len(set(picture.resize((50, 50)).tobytes())) > 10, f"{path.name} is blank"


def test_names_cannot_break_out_of_the_page(folders: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(folders[0], folder)
    document = json.loads((folder / "run.json").read_text()) | {"name": "</script><script>alert(1)</script>"}
    (folder / "run.json").write_text(json.dumps(document))
    (page,) = write_report([folder], tmp_path / "out", "<b>title</b>", png=False)
    text = page.read_text()
    assert "<script>alert(1)" not in text
    assert "<b>title" not in text


def test_command(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*map(str, folders), "--out", str(tmp_path / "out"), "--no-png"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out' / 'index.html'} and 0 PNGs\n"
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} has no metrics.jsonl" in capsys.readouterr().err


def test_empty_run_and_missing_matplotlib_are_told(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="empty"):
        load_runs([tmp_path])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"openlm-moe\[report\]"):
        write_report(folders, tmp_path / "out", "title")
