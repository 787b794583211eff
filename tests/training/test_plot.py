"""`moe-lc plot` draws what the log says, of a finished run and of one that has just begun."""

import math

import pytest
from matplotlib import pyplot as plt

from modeling_moe_lc.training import plot
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.run_log import STAGE, STEP, VALIDATION, RunLog, read_log, records_of


STAGES = {"8K": (8192, 12), "64K": (65536, 20)}  # length, last step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with RunLog(folder, total_tokens=20_000_000) as log:
        step = 0
        for name, (length, last) in STAGES.items():
            while step < last:
                step += 1
                log.write(STEP, step, 1_000_000 * step, numbers(step) | {"stage": name})
            log.write(VALIDATION, step, 1_000_000 * step, {"stage": name, "loss": 3.0 - step / 20})
            borders = [0, *(length * 4 >> halvings for halvings in range(6, -1, -1))]
            curve = [3.0 - 0.1 * place for place in range(7)]
            by_position = {
                "trained_length": length, "borders": borders, "one_document": curve, "windows": [*curve[:-1], math.nan],
            }  # fmt: skip
            log.write(STAGE, step, 1_000_000 * step, {"stage": name, "by_position": by_position})
    return folder


def numbers(step):
    return {
        "loss": 4.0 - step / 20 if step != 7 else math.nan,
        "spike": step == 9,
        "tokens_per_second": 1000.0 + step,
        "mfu": 0.3,
        "max_violation": [2.0 / step, 1.0 / step, 0.0],
        "floor": 0.1,
    }


def axis():
    return plt.figure().add_subplot()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_the_command_writes_one_png(run, tmp_path, capsys):
    assert main(["plot", str(run)]) == 0
    assert is_png(run / "curves.png") and str(run / "curves.png") in capsys.readouterr().out
    assert main(["plot", str(run), "--out", str(tmp_path / "other.png")]) == 0
    assert is_png(tmp_path / "other.png") and [path.name for path in tmp_path.iterdir()] == ["other.png"]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("routed", [True, False])
def test_a_run_that_has_just_begun_is_drawn(tmp_path, steps, routed):
    with RunLog(tmp_path, total_tokens=1000) as log:
        for step in range(1, steps + 1):
            sparse = {"max_violation": [0.0, 0.0], "floor": math.nan} if routed else {}
            log.write(STEP, step, 100 * step, {"loss": 5.0, "tokens_per_second": 10.0, **sparse})
    assert main(["plot", str(tmp_path)]) == 0
    assert is_png(tmp_path / "curves.png")


@pytest.mark.parametrize("with_log", [True, False])
def test_nothing_to_draw_is_an_error_without_a_traceback(tmp_path, capsys, with_log):
    if with_log:
        RunLog(tmp_path, total_tokens=1000).close()
        capsys.readouterr()
    assert main(["plot", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-lc: error: run: expected") and "Traceback" not in error


def test_loss_is_drawn_over_tokens_with_validation_and_spikes(run):
    drawn, records = axis(), read_log(run)
    plot.draw_loss(drawn, records_of(records, STEP), records_of(records, VALIDATION), 1e6)
    training, validation, spikes = drawn.get_lines()
    assert training.get_xdata().tolist() == [*range(1, 21)] and math.isnan(training.get_ydata()[6])
    assert validation.get_xdata().tolist() == [12, 20]
    assert validation.get_ydata() == pytest.approx([2.4, 2.0])
    assert spikes.get_xdata().tolist() == [9]


def test_stages_are_marked_where_they_end(run):
    drawn = axis()
    plot.mark_stages(drawn, records_of(read_log(run), STEP), 1e6)
    assert [line.get_xdata()[0] for line in drawn.get_lines()] == [12, 20]
    assert [text.get_text() for text in drawn.texts] == [*STAGES]


def test_each_stage_has_a_curve_by_position(run):
    drawn = axis()
    plot.draw_positions(drawn, records_of(read_log(run), STAGE))
    curves = [line for line in drawn.get_lines() if line.get_label() in STAGES]
    assert [line.get_xdata()[-1] for line in curves] == [4 * 8192, 4 * 65536]
    assert curves[0].get_ydata()[-1] == pytest.approx(2.4)


def test_the_heat_map_has_a_row_for_each_layer_and_a_column_for_each_step(run):
    drawn = axis()
    plot.draw_load(drawn.figure, drawn, records_of(read_log(run), STEP), 1e6)
    [mesh] = drawn.collections
    grid = mesh.get_array().reshape(3, 20)
    assert grid[:2, 1].tolist() == [1.0, 0.5] and grid[2].max() == plot.LEAST


def test_a_long_run_has_a_heat_map_of_bounded_size():
    steps = [{"tokens": step, **numbers(step)} for step in range(1, 2002)]
    drawn = axis()
    plot.draw_load(drawn.figure, drawn, steps, 1.0)
    assert drawn.collections[0].get_array().size <= 3 * plot.COLUMNS


@pytest.mark.parametrize(
    ("tokens", "unit"), [(999, ""), (1000, "thousand "), (2_000_000, "million "), (3 * 10**9, "billion ")]
)
def test_tokens_are_counted_in_readable_units(tokens, unit):
    assert plot.unit_of(tokens)[1] == unit


def test_runs_are_compared_in_groups(run, tmp_path, capsys, monkeypatch):
    folders = []
    for name in ("sign-0", "sign-1", "none-0"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "log.jsonl").write_bytes((run / "log.jsonl").read_bytes())
    drawn = []
    monkeypatch.setattr(plt, "close", lambda figure: drawn.append(figure))
    out = tmp_path / "compared.png"
    assert main(["plot", *map(str, folders), "--out", str(out)]) == 0 and is_png(out)
    loss, load, end = drawn[0].axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["sign", "none"]
    assert [line.get_color() for line in loss.lines] == ["C0", "C0", "C1"]
    assert load.lines[0].get_ydata()[1] == pytest.approx((1.0 + 0.5) / 2)  # means over layers, then over steps
    assert [label.get_text() for label in end.get_xticklabels()] == ["sign", "none"]
    assert [line.get_ydata()[0] for line in end.lines] == [2.0] * 3


def test_a_comparison_needs_a_file_and_different_names(run, tmp_path, capsys):
    assert main(["plot", str(run), str(run)]) == 2
    assert "out: expected a file" in capsys.readouterr().err
    assert main(["plot", str(run), str(run), "--out", str(tmp_path / "x.png")]) == 2
    assert "runs: expected folders of different names" in capsys.readouterr().err
