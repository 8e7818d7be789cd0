"""results/: README.md and the figures are what the records say, and records that change are seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from openlm_moe.hosts.builtin.count import short_count
from openlm_moe.plan import published
from results import remake
from results.tables import layer, numerics, parameters, throughput

README = remake.README.read_text()


def test_tables_are_the_records() -> None:
    """To update: `make results`."""
    assert remake.remade(README) == README


def test_figures_were_drawn_from_these_records() -> None:
    from results.figures.drawing import HERE, digest, digest_of

    pngs = sorted(HERE.glob("*.png"))
    assert [path.name for path in pngs] == sorted(remake.figure_names())
    assert {path.name: digest_of(path) for path in pngs} == {path.name: digest() for path in pngs}


def test_every_figure_can_be_drawn(tmp_path: Path) -> None:
    remake.draw_figures(tmp_path)
    for name in remake.figure_names():
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"(figures/{name})" in README


def test_a_number_typed_by_hand_is_replaced() -> None:
    start = README.index("<!-- perplexity -->")
    at = start + re.search(r"\d", README[start:]).start()
    typed = README[:at] + str((int(README[at]) + 1) % 10) + README[at + 1 :]
    assert typed != README
    assert remake.remade(typed) == README


def test_a_lost_region_is_an_error() -> None:
    with pytest.raises(SystemExit, match="regions"):
        remake.remade(README.replace("<!-- numerics -->", ""))
    with pytest.raises(SystemExit, match="no end"):
        remake.remade(README.replace("<!-- end of numerics -->", ""))


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http|#)([^)]+)\)", README))
def test_links_lead_to_files(link: str) -> None:
    assert (remake.RESULTS / link).exists()


@pytest.mark.parametrize("model", published.MODELS)
def test_parameters_are_the_published_ones(model: str) -> None:
    told = published.MODELS[model]
    for experts, size in told["parameters"].items():
        total, active = parameters.counted(model, int(experts))
        assert (short_count(total), short_count(active)) == (size, told["active_parameters"])


def test_published_ratios() -> None:
    """As they are quoted: 0.72, 0.78, 0.82, 0.93, 0.94 in perplexity, 0.49, 0.63, 0.69, 0.61, 0.575 in throughput."""
    ratios = [published.perplexity_ratio(m, 8) for m in published.MODELS]
    assert ratios == pytest.approx([0.72, 0.78, 0.82, 0.93, 0.94], abs=0.006)
    assert [published.throughput_ratio(m) for m in published.MODELS] == pytest.approx(
        [0.49, 0.63, 0.69, 0.61, 0.575], abs=0.006
    )
    assert published.perplexity_ratio("open_lm_410m", 32) is None


def changed(path: Path, out: Path, change) -> Path:
    """A copy of a file of records whose last one went through `change`."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    change(found[-1])
    out.write_text("".join(json.dumps(record) + "\n" for record in found))
    return out


def test_a_changed_record_changes_its_table(tmp_path: Path) -> None:
    def error(record):
        record["error"] *= 2

    made = changed(remake.RESULTS / "numerics" / "record.jsonl", tmp_path / "numerics.jsonl", error)
    assert numerics.make(made) != numerics.make()

    def ratio(record):
        record["results"]["moe"]["ratio"] *= 1.1

    path = throughput.RECORDS
    made = changed(path, tmp_path / "throughput.jsonl", ratio)
    assert throughput.make(made) != throughput.make()
    model = json.loads(path.read_text().splitlines()[-1])["model"]
    before, after = (throughput.newest(p)[model] for p in (path, made))
    assert throughput.measured(after) == pytest.approx(throughput.measured(before) / 1.1)


def test_the_bound_of_throughput() -> None:
    """By hand, weights that a token of 41m meets: 12 d^2 a block, and 8 d^2 and a router more where it has experts."""
    record = next(iter(throughput.newest().values()))
    assert record["model"] == "open_lm_41m"
    d, layers, vocab = 288, 12, 50432
    dense = layers * 12 * d * d + layers * d * (record["seq_len"] + 1) + d * vocab
    moe = dense + layers // 2 * (8 * d * d + 8 * d)
    assert throughput.bound(record) == pytest.approx(dense / moe, rel=1e-9)


def test_layer_table_has_every_shape() -> None:
    text = layer.make()
    for record in layer.newest():
        assert f"{record['name']}: d {record['shape']['dim']}" in text
