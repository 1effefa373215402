"""The benchmark's own arithmetic: names, medians, ratios, differences, memory estimates, tables."""

import json
from dataclasses import replace
from threading import Event

import pytest
import torch
from benchmarks.cell import Cell, Outcome, difference, needs
from benchmarks.growth import findings, mlp_flops, slope
from benchmarks.laplace_torch import bytes_asked
from benchmarks.measure import ENDLESS, LONG, alternate, reason, repetitions
from benchmarks.operations import ACTIONS, STRUCTURES, VARIANTS, Operation, operation
from benchmarks.results import Measurement, dump, merged, parse, ratio
from benchmarks.targets import TARGETS, at_least, both, target
from benchmarks.workloads import SHAPES, WORKLOADS, Shape

from benchmarks import environment, plan, report


def measured(by="ours", seconds=2.0, gradient=0.5, **fields):
    return Measurement(by, "lenet", "fit-kron", 128, 1, seconds=seconds, gradient=gradient, **fields)


def outcome(peer=None, **fields):
    cell = Cell("lenet", "fit-kron", 128)
    return Outcome(cell, measured(**fields), (peer,) if peer else (), (1e-6,) if peer else ())


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_operations_go_both_ways(action, structure, variant):
    op = Operation(action, structure, variant)
    assert operation(op.name) == op
    assert structure in op.title


@pytest.mark.parametrize("name", ["fit", "fit-kfac", "bake-diag", "fit-kron-2e-3", ""])
def test_a_name_that_is_none_says_what_is(name):
    with pytest.raises(ValueError, match="ACTION-STRUCTURE"):
        operation(name)


def test_a_measurement_survives_its_line_of_output():
    m = measured(peak=17, more={"times": [1.0, 2.0]})
    assert parse(f"some warning\n{dump(m)}\n") == m
    with pytest.raises(ValueError, match="no measurement"):
        parse("nothing here")


def test_epochs_and_forwards_are_ratios():
    m = measured(forward=0.25)
    assert (m.epochs, m.forwards) == (4.0, 8.0)
    assert ratio(None, 1.0) is None
    assert ratio(1.0, None) is None
    assert measured(gradient=None).epochs is None


def test_repeats_give_the_middle_run_and_the_highest_peak():
    runs = [measured(seconds=s, peak=p) for s, p in ((3.0, 10), (1.0, 30), (2.0, 20))]
    one = merged(runs)
    assert (one.seconds, one.peak) == (2.0, 30)
    assert one.more["epochs"] == [2.0, 4.0, 6.0]
    failed = measured(seconds=None, error="no")
    assert merged([failed]) == failed
    assert merged([failed, runs[0]]).seconds == 3.0


def test_work_takes_turns_and_long_work_fewer():
    calls = []
    works = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    known, slow, endless = ({"cpu": [s], "wall": [s + 1]} for s in (1.0, LONG + 1, ENDLESS + 1))
    times = alternate(works, 2, {"a": known, "b": endless, "c": slow})
    assert calls == ["a", "c", "a"]
    assert times["b"] == endless
    assert [len(times[name]["wall"]) for name in "ac"] == [2, 1]
    assert times["c"] != slow


def test_brief_work_is_repeated_within_a_timing():
    assert repetitions(1.0) == 1
    assert repetitions(0.04) == 3
    assert repetitions(0.0) == 100


def test_the_difference_is_relative_to_the_largest_value_of_the_peer():
    theirs = torch.tensor([1.0, -4.0])
    assert difference(torch.tensor([1.0, -3.0]), theirs) == 0.25
    assert difference(theirs, None) is None
    assert difference(torch.ones(3), theirs) is None
    assert difference(torch.zeros(2), torch.zeros(2)) == 0.0


def test_bytes_that_the_peer_would_ask_for():
    shape = Shape(parameters=1000, outputs=10, activations=8)
    options = {"batch": 4, "new": 2, "last_layer": False}
    assert bytes_asked(operation("fit-full"), shape, **options) == 3 * 4 * 1000**2
    assert bytes_asked(operation("fit-diag"), shape, **options) == 2 * 4 * (4 * 10 * 1000)
    assert bytes_asked(operation("predict-kron"), shape, **options) == 2 * 4 * (2 * 10 * 1000)
    assert bytes_asked(operation("fit-kron"), shape, **options) == 0
    wide = replace(shape, activations=10**6)
    assert bytes_asked(operation("fit-diag"), wide, **options) == 4 * (4 * 10) * 4 * 10**6
    assert bytes_asked(operation("fit-diag"), wide, **(options | {"last_layer": True})) == 2 * 4 * (4 * 10 * 1000)


def test_the_jacobian_of_128_images_by_resnet_18_is_the_issue_57_gigabytes():
    cell = Cell("resnet18", "predict-ekfac", 64, 128)
    assert needs(cell) / 2 == pytest.approx(57.25e9, rel=1e-3)


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"resnet20", "resnet20-frozen", "llama"}))
def test_shapes_are_those_of_the_networks(name, monkeypatch):
    """Sizes only, so weights and data are not read."""
    images = {"mlp": (1, 28, 28), "len": (1, 28, 28), "hea": (1280,)}.get(name[:3], (3, 32, 32))
    monkeypatch.setattr("benchmarks.workloads.trained", lambda _, model, *a, **k: model.eval())
    monkeypatch.setattr("benchmarks.workloads._first", lambda *a: (torch.zeros(2, *images), torch.zeros(2).long()))
    monkeypatch.setattr("benchmarks.workloads._features", lambda: (torch.zeros(2, 1280), torch.zeros(2).long()))
    task, shape = WORKLOADS[name](1, 1), SHAPES[name]
    assert sum(p.numel() for p in task.parameters) == shape.parameters
    assert task.forward_of_new().shape == (shape.rows, shape.outputs)
    sizes = []
    for part in task.model.modules():
        part.register_forward_hook(lambda _, __, out: sizes.append(out.numel() if out.requires_grad else 0))
    task.rows(task.new)
    if not shape.last_layer:
        assert max(sizes) == shape.activations


def test_the_plans_have_shapes_targets_and_no_cell_twice():
    for cells in (list(plan.whole()), list(plan.quick())):
        assert len(set(cells)) == len(cells)
        assert {cell.workload for cell in cells} <= set(SHAPES)
        assert all(operation(cell.operation).name == cell.operation for cell in cells)
    measured_cells = {(cell.workload, cell.operation) for cell in plan.whole()}
    assert set(TARGETS) <= measured_cells


def test_targets_are_reached_missed_or_unknown():
    epochs = target("lenet", "fit-kron")
    assert epochs.reached(outcome()) is True
    assert epochs.reached(outcome(seconds=2.1)) is False
    assert epochs.reached(outcome(seconds=None, error="no")) is None
    faster = target("lenet", "predict-kron")
    ours = {"seconds": 1.0, "gradient": 1.0, "peak": 10}
    peer = measured("laplace-torch", 200.0, 1.0, peak=300)
    assert faster.reached(outcome(peer, **ours)) is True
    assert faster.reached(outcome(replace(peer, peak=100), **ours)) is False
    assert faster.reached(outcome(replace(peer, seconds=None), **ours)) is None
    assert faster.reached(outcome(**ours)) is None
    assert target("lenet", "samples-kron") is None
    assert target("head", "predict-kron-mc") is target("head", "predict-kron")
    assert target("resnet20-frozen", "fit-diag") is TARGETS["resnet20", "fit-diag"]
    assert at_least(None, 1.0) is None
    assert both(None, False) is False


def test_a_covariance_target_counts_the_forward_pass_too():
    ours = measured(seconds=3.0, gradient=1.0, forward=0.25, covariances=0.75)
    assert target("head", "predict-kron").reached(Outcome(Cell("head", "predict-kron", 64, 64), ours)) is True
    slow = replace(ours, seconds=3.1)
    assert target("head", "predict-kron").reached(Outcome(Cell("head", "predict-kron", 64, 64), slow)) is False


def test_rows_of_the_table():
    peer = measured("laplace-torch", 8.0, 0.5, peak=4_000_000)
    (row,) = report.rows_of(outcome(peer, peak=2_000_000))
    assert dict(zip(report.HEADER, row)) == {
        "network": "LeNet-5", "operation": "fit, kron", "N": "128", "Lapwing: gradient epochs": "4",
        "Lapwing: MB": "2", "peer": "laplace-torch", "peer: gradient epochs": "16", "peer: MB": "4",
        "time ratio": "4 ×", "memory ratio": "2 ×", "difference": "1e-06", "target": "≤ 4 epochs",
        "target reached": "yes",
    }  # fmt: skip
    brief = report.short([outcome(peer, peak=2_000_000)]).splitlines()[-1]
    assert "| 4 epochs, 2 MB | laplace-torch: 16 epochs, 4 MB; 4 × the time, 2 × the memory | ≤ 4 epochs |" in brief
    (alone,) = report.rows_of(outcome(seconds=2.2))
    assert alone[-1] == "**no**"
    failed = replace(peer, error="ValueError: a|b", seconds=None, peak=None, n=64)
    text = report.table([outcome(failed)])
    assert "ValueError: a\\|b" in text
    assert "laplace-torch (N 64)" in text
    assert len({line.replace("\\|", "").count("|") for line in text.splitlines()}) == 1


def test_the_table_beside_laplace_torch_has_only_its_rows():
    peer = measured("laplace-torch", 8.0, 0.5, peak=4_000_000)
    refused = replace(peer, error="NotImplementedError: Found parameters in un-supported layers.", seconds=None)
    text = report.peers([outcome(peer, peak=2_000_000), outcome(refused), outcome(replace(peer, by="curvlinops"))])
    _, _, both, alone = text.splitlines()
    sides = "4 gradient epochs, 2 MB | 16 gradient epochs, 4 MB"
    assert both == f"| LeNet-5 | fit, kron | {sides} | 4 × | 2 × |"
    assert "| refuses the network |" in alone


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.01234, "0.0123"), (1.234, "1.23"), (99.96, "100"), (1234.5, "1,234")]
)
def test_numbers_have_three_figures(value, text):
    assert report.number(value) == text


def test_outcomes_survive_json_and_marks_are_filled_in():
    known = outcome(measured("laplace-torch", 8.0))
    assert report.restored(json.loads(json.dumps(report.stored(known)))) == known
    text = "before\n<!-- bench: short -->\nold\n<!-- end -->\nafter\n<!-- bench: long -->\n<!-- end -->\n"
    filled = report.insert(text, "short", "new \\1")
    assert filled == text.replace("old", "new \\1")


def test_a_part_of_a_page_has_lower_headings():
    assert report.nested("# Benchmark\n\nhere\n\n## 1 thread\n") == "here\n\n### 1 thread\n"


def test_a_busy_machine_is_told():
    place = {
        "date": "today", "processor": "a chip", "cores": 2, "load": [0.5, 1.0], "python": "3.11", "torch": "2.13",
        "laplace-torch": "0.3", "curvlinops": "3.0.1", "commit": "abc", "command": "it", "minutes": 1, "cpu_minutes": 1,
    }  # fmt: skip
    assert "provisional" not in report.conditions({"place": place})
    assert "provisional" in report.conditions({"place": place | {"load": [0.5, 6.0]}})


def test_the_exponent_of_a_power_law():
    sizes = [1.0, 2.0, 4.0]
    assert slope(sizes, [3 * x**1.5 for x in sizes]) == pytest.approx(1.5)
    assert slope([1.0], [1.0]) is None
    assert slope([1.0, 1.0], [1.0, 2.0]) is None


def test_the_flop_count_of_a_gradient_sized_fit():
    """At one datum and one direction: forward, backward and squares of 784-2-2-10, term by term."""
    forward, backward, squares = 784 * 2 + 2 * 2 + 2 * 10, 2 * 2 + 2 * 10, 785 * 2 + 3 * 2 + 3 * 10
    assert mlp_flops(2, 1, "fit-diag", directions=1) == 2 * (forward + backward + squares)
    assert slope([512, 1024, 2048], [mlp_flops(w, 512, "fit-kron") for w in (512, 1024, 2048)]) > 2


def test_growth_is_judged():
    def point(n, seconds, peak):
        cell = Cell("lenet", "fit-kron", n)
        return "N", n, Outcome(cell, measured(seconds=seconds, peak=peak))

    flat, linear = findings([point(128, 1.0, 100), point(256, 2.0, 110)])
    assert "1.10 ×" in flat
    assert "reached" in flat
    assert "N^1.00" in linear
    assert "reached" in linear
    grown, square = findings([point(128, 1.0, 100), point(256, 4.0, 200)])
    assert "missed" in grown
    assert "missed" in square


def test_pins_are_read_without_comments(tmp_path):
    assert environment.pinned("# why\nlaplace-torch==0.3\n\neinops==0.8.2  # so\n") == {
        "laplace-torch": "0.3",
        "einops": "0.8.2",
    }
    assert environment.installed(tmp_path / "none", ["torch"]) == []


def test_errors_are_one_line():
    assert reason(ValueError("a\n  b")) == "ValueError: a b"
    with pytest.raises(AssertionError) as caught:
        failing()
    assert reason(caught.value) == "AssertionError in failing"


def failing():
    raise AssertionError


def test_cells_that_run_side_by_side_keep_their_order(tmp_path, monkeypatch):
    import benchmarks.__main__ as main

    cells = [Cell("lenet", "fit-kron", n, 1) for n in (1, 2, 3, 4, 5)]
    asked = []
    first = Event()

    def run(cell, place):
        asked.append(cell.n)
        if cell.n == 1:  # the first to begin is the last to end
            assert first.wait(60)
        if cell.n == 5:
            first.set()
        return Outcome(cell, measured(seconds=float(cell.n)))

    monkeypatch.setattr(main, "run", run)
    kept = main.Kept(tmp_path / "cells.jsonl", resume=False)
    found = list(main.progress(cells, kept, None, "cells", jobs=2))
    assert [outcome.cell.n for outcome in found] == [1, 2, 3, 4, 5]
    again = main.Kept(tmp_path / "cells.jsonl", resume=True)
    assert [o.ours.seconds for o in main.progress(cells, again, None, "cells", jobs=2)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(asked) == [1, 2, 3, 4, 5], "what is known is not measured again"
