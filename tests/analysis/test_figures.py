from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from records import failed, results, run, spec
from records import save as save_runs

from analysis import figures
from analysis.drawing import COLOURS, MARKERS, assign_looks, choose_looks, compose, shorten_names
from analysis.drawing.curves import MAX_CURVES
from analysis.drawing.svg import save
from analysis.figures import throughput
from bench.cli import main
from tests.bench.installed_packages import Install, forget

RUNS = [*(run(spec("ddp", nodes=nodes)) for nodes in (1, 2)), run(), failed("oom", spec("zero3"))]


def test_series_have_distinct_colour_blind_safe_colours_and_markers() -> None:
    okabe_ito = {"#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(COLOURS) - okabe_ito == {"#7F7F7F"}
    assert len(set(COLOURS)) == len(set(MARKERS)) == 7
    engines = [path.stem for path in Path(__file__).parents[2].glob("conf/engine/*.yaml")]
    looks = choose_looks(engines)
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(engines)


def test_series_of_one_engine_share_colour_and_marker_shape_and_differ_in_line_and_fill() -> None:
    labels = ["zero2", "zero2 (lr=1)", "zero2 (lr=2)", "ddp"]
    looks = assign_looks(labels, ["ddp", "zero2", "zero3"])
    alone = assign_looks(["zero2"], ["ddp", "zero2", "zero3"])
    assert alone["zero2"] == looks["zero2"]
    series = [looks[label] for label in labels[:3]]
    assert len({(look.colour, look.marker) for look in series}) == 1
    assert len({(str(look.line), str(look.style_marks())) for look in series}) == 3
    assert len({str(look.style_marks()) for look in series}) == 3, "markers are drawn even without a line between them"


def test_as_many_series_of_one_engine_as_a_figure_has_differ_in_their_markers() -> None:
    looks = assign_looks([f"ddp (lr={place})" for place in range(MAX_CURVES)], ["ddp", "zero1"])
    assert len({str(look.style_marks()) for look in looks.values()}) == MAX_CURVES
    assert {look.colour for look in looks.values()} == {COLOURS[0]}


def test_shortened_names_stay_different() -> None:
    alike = [f"ddp (lr={rate}, warmup_tokens={tokens})" for rate in (0.1, 0.2) for tokens in (0, 5)]
    assert shorten_names(alike, [40] * 4) == alike
    assert shorten_names(alike[::2], [12] * 2) == ["ddp (lr=0.1…", "ddp (lr=0.2…"], "a cut at the end is enough"
    assert shorten_names(alike, [20] * 4) == ["ddp (0.1, 0)", "ddp (0.1, 5)", "ddp (0.2, 0)", "ddp (0.2, 5)"]
    assert len(set(shorten_names([f"a name that ends in {end}" for end in (10, 11)], [9] * 2))) == 2
    keys = ["ddp (eps=0.1, amsgrad=True)", "ddp (eps=0.1, maximize=True)"]
    assert all("eps=" in name for name in shorten_names(keys, [20] * 2)), "only keys distinguish these names"


def test_usual_engines_look_the_same_in_every_set_of_engines() -> None:
    usual = ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp"]
    together = choose_looks([*usual, "pipeline", "mine"])
    assert all(choose_looks([engine])[engine] == together[engine] for engine in usual)


def test_figures_are_reproducible_and_leave_matplotlib_state_unchanged() -> None:
    picture = next(picture for _, picture in figures.build_pictures(results(run())))
    before = matplotlib_state()
    first, second = ({form: save(compose(picture), form, "one") for form in ("svg", "pdf", "png")} for _ in range(2))
    assert first == second
    assert matplotlib_state() == before
    assert first["pdf"].startswith(b"%PDF")
    assert first["png"].startswith(b"\x89PNG")


def matplotlib_state() -> tuple[list[int], float]:
    return plt.get_fignums(), plt.rcParams["font.size"]


def test_figures_without_content_are_omitted() -> None:
    one_node, nothing = results(run()), results(failed("oom"))
    shown = [
        [figure.name for figure, _ in figures.build_pictures(found)] for found in (results(*RUNS), one_node, nothing)
    ]
    names = [[figure.name for figure in figures.list_figures()], *shown]
    everything = [
        "answers", "throughput", "step_time", "memory", "memory_by_stage", "strong_scaling", "weak_scaling",
        "best_configurations", "idle_share", "pass_lanes", "rank_spread", "step_series", "loss_curves",
    ]  # fmt: skip
    assert names[0] == [*everything, "search"]
    without = ("strong_scaling", "idle_share", "pass_lanes", "loss_curves")
    assert names[1] == [name for name in everything if name not in without], "every node count has its own global batch"
    assert names[2] == ["throughput", "step_time", "memory", "memory_by_stage", "rank_spread", "step_series"]
    assert names[3] == ["throughput", "step_time", "memory", "memory_by_stage"], "out of memory is shown"


def test_only_option_selects_the_figures_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_runs(tmp_path / "results" / "runs", *RUNS)
    assert main(["figures", "--format", "svg", "--only", "memory,throughput"]) == 0
    assert capsys.readouterr().out.split() == [f"results/figures/smoke/{name}.svg" for name in ("throughput", "memory")]
    assert (tmp_path / "results/figures/smoke/memory.svg").read_text().startswith("<?xml")
    assert main(["figures", "--only", "memry"]) == 2
    assert "--only memry: no such figure; did you mean memory?" in capsys.readouterr().err


def test_figures_without_data_are_named_with_the_runs_that_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["figures", str(save_runs(tmp_path / "runs", *RUNS)), "--format", "svg", "--out", str(tmp_path / "out")]
    assert main([*words, "--only", "search,memory"]) == 0
    printed = capsys.readouterr()
    assert printed.out.split() == [str(tmp_path / "out" / "memory.svg")]
    (line,) = printed.err.splitlines()
    assert line.startswith("not drawn: search, which needs runs in the folder of a search")
    (tmp_path / "out" / "memory.svg").unlink()
    assert main([*words, "--only", "search,loss_curves"]) == 2
    *lines, error = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == ["not drawn: loss_curves", "not drawn: search"]
    assert "no figure can be drawn from these runs" in error
    assert not list((tmp_path / "out").iterdir())


FIGURE = """
from analysis.drawing import Panel, Picture
TITLE, PLACE, ALT, NEEDS = "Theirs", 1, "Nothing.", "runs"
def draw(axes): DRAW
def picture(results): return RESULT
"""


@pytest.mark.parametrize(
    ("draw", "result", "why"),
    [
        ("1 / 0", "Picture([Panel(title=['a'], draw=draw)])", "draw failed: ZeroDivisionError: division by zero"),
        ("pass", "1 / 0", "picture failed: ZeroDivisionError: division by zero"),
        ("pass", "None", "picture returned None, which is not a Picture"),
    ],
)
def test_broken_figure_of_a_package_is_skipped_with_a_warning(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture, draw: str, result: str, why: str
) -> None:
    install("zeroscale.figure", "theirs = their_figure", FIGURE.replace("DRAW", draw).replace("RESULT", result))
    folder = str(save_runs(tmp_path / "runs", *RUNS))
    words = ["figures", folder, "--format", "svg", "--only", "memory,theirs", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["memory.svg"]
    (message,) = caplog.messages
    assert message.startswith(f"figure theirs of package somebodys-package skipped: {why}")
    caplog.clear()
    forget()
    assert main(["report", folder, "--out", str(tmp_path / "report")]) == 0
    assert message in caplog.messages and (tmp_path / "report" / "report.html").is_file()


def test_broken_figure_of_zeroscale_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "picture", lambda results: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(figures.build_pictures(results(run())))


def test_help_has_each_example_on_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["figures", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "zeroscale figures results/runs/smoke" in lines
