"""Items with many outputs: losses by draws of f against those from the exact covariances."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing
from lapwing.evidence import Groups, collect, drawnoutputs, heldout, linked, partition
from lapwing.evidence.drawnoutputs import collect_draws, nodes_of_draws
from lapwing.evidence.heldout import Nodes
from lapwing.evidence.settings import Setting

WORDS, LENGTH = 12, 5


def tokens(n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = (ids * 5 + 1) % WORDS
    labels[:, 0] = -100
    return [(ids[:3], labels[:3]), (ids[3:], labels[3:])]


def network(words: int = WORDS) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(words, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, words)).double()


def fitted(structure: str = "kron") -> lapwing.Laplace:
    return lapwing.fit(network(), tokens(20, 0), "classification", structure=structure, select=["1.*", "3.*"])


SETTINGS = [
    Setting(torch.tensor([tau]).double(), T, logit_temperature=s)
    for tau, T, s in ((0.1, 1.0, 1.0), (3.0, 1.0, 0.7), (1.0, 100.0, 1.5), (1e3, 0.1, 1.0))
]


def both(la: lapwing.Laplace, groups: Groups, monkeypatch: Any, pairs: int) -> tuple[Any, Any]:
    monkeypatch.setattr(drawnoutputs, "PAIRS", pairs)
    held, nodes = tokens(8, 1), Nodes.spanning(1e-4, 1e5, la.curvature.matrix.largest_eigenvalue())
    stream = la._predictive.held_out(held)
    exact = collect(la.belief, groups, stream, nodes, score=linked(samples=4096), memory=2**30)
    pushed = la._predictive.pushed(la._predictive.labeled(held))
    few = nodes_of_draws(nodes, la.curvature.matrix.largest_eigenvalue())
    return exact, collect_draws(la.belief, groups, pushed, few, memory=2**32)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full", "lowrank"])
def test_losses_are_those_of_covariances(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted(structure)
    exact, draws = both(la, Groups.scalar(la.params.size), monkeypatch, 1000)
    truth, got = exact.losses(SETTINGS), draws.losses(SETTINGS)
    assert got.shape == truth.shape == (4, 8 * (LENGTH - 1))
    for loss, near in zip(got, truth):
        assert (loss - near).abs().max() < 0.1
        assert (loss.mean() - near.mean()).abs() < 0.01


def test_a_precision_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted()
    groups = partition("layerwise", la.curvature.names, la.params)
    exact, draws = both(la, groups, monkeypatch, 1000)
    settings = [Setting(torch.tensor(taus).double()) for taus in ([0.05, 100.0], [100.0, 0.05])]
    truth, got = exact.losses(settings).mean(1), draws.losses(settings).mean(1)
    assert (got - truth).abs().max() < 0.3 * (truth[0] - truth[1]).abs()
    with pytest.raises(lapwing.errors.IncompatiblePrior, match="one precision per block"):
        both(fitted("full"), groups, monkeypatch, 2)


def test_a_damped_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted().damping("factored")
    groups = Groups.scalar(la.params.size)
    monkeypatch.setattr(drawnoutputs, "PAIRS", 1000)
    largest = la.curvature.matrix.largest_eigenvalue()
    nodes = Nodes.spanning(1e-4, 1e5, largest, la.curvature.matrix.largest_damped(la.belief.split))
    stream, held = la._predictive.held_out(tokens(8, 1)), la._predictive.labeled(tokens(8, 1))
    exact = collect(la.belief, groups, stream, nodes, score=linked(samples=4096), memory=2**30)
    draws = collect_draws(la.belief, groups, la._predictive.pushed(held), nodes_of_draws(nodes, largest), memory=2**32)
    assert (exact.losses(SETTINGS).mean(1) - draws.losses(SETTINGS).mean(1)).abs().max() < 0.01


def test_few_draws_have_little_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithm of an average of 32 draws, corrected, against many draws."""
    la = fitted()
    groups = Groups.scalar(la.params.size)
    few, many = both(la, groups, monkeypatch, 16)[1], both(la, groups, monkeypatch, 1000)[1]
    assert (few.losses(SETTINGS).mean(1) - many.losses(SETTINGS).mean(1)).abs().max() < 0.03


def test_part_of_the_classes_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted()
    groups = Groups.scalar(la.params.size)
    whole = both(la, groups, monkeypatch, 500)[1]
    for name, value in (("ALL", 4), ("TOP", 3), ("TAIL", 30)):
        monkeypatch.setattr(drawnoutputs, name, value)
    part = both(la, groups, monkeypatch, 500)[1]
    assert part.items[0].mean.shape[-1] == 33
    narrow = [Setting(torch.tensor([1e5]).double())]
    plain = -la.likelihood.log_prob(part.f, part.y)
    assert (part.losses(narrow)[0] - plain).abs().max() < 1e-3  # exact where f does not vary
    assert (part.losses(SETTINGS).mean(1) - whole.losses(SETTINGS).mean(1)).abs().max() < 0.05


def test_gradients_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descent moves prior and temperature by autograd: compared with differences."""
    la = fitted()
    sweep = both(la, Groups.scalar(la.params.size), monkeypatch, 8)[1]
    one = torch.ones((), dtype=torch.float64)

    def total(log_tau: torch.Tensor, log_T: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        coefficients = sweep.coefficients(log_tau.exp()[None], log_T.exp(), one)[None]
        return torch.cat(list(sweep.parts(coefficients, one, log_T.exp()[None], s[None])), 1).sum()

    at = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.2, 0.5, 1.2)]
    assert torch.autograd.gradcheck(total, at)


def test_tune_takes_draws_where_outputs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted()
    exact = la.tune(tokens(8, 1))
    assert not any("draws of f" in message for message in exact.tuning.messages)
    monkeypatch.setattr(heldout, "TOKENS", 10)
    tuned = la.tune(iter(tokens(8, 1)))
    assert any("scored by 32 draws of f at 32 items of 8 data" in message for message in tuned.tuning.messages)
    assert tuned.tuning.score == pytest.approx(exact.tuning.score, abs=0.02)


def test_memory_that_is_full_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldout, "TOKENS", 10)
    la = fitted()
    small = lapwing.fit(
        network(), tokens(20, 0), "classification", structure="kron", select=["1.*", "3.*"], memory=2_000_000
    )
    messages = small.tune(tokens(60, 1)).tuning.messages
    assert any("later data were not read" in message for message in messages)
    with pytest.raises(lapwing.TooLarge, match=r"draws of 12 outputs per item.*memory="):
        collect_draws(
            la.belief, Groups.scalar(la.params.size), la._predictive.pushed(la._predictive.labeled(tokens(8, 1))),
            nodes_of_draws(Nodes.spanning(1e-4, 1e5, 10.0), 10.0), memory=100_000,
        )  # fmt: skip


def test_nothing_that_counts() -> None:
    la = fitted()
    ids, labels = tokens(8, 1)[0]
    stream = la._predictive.pushed(la._predictive.labeled([(ids, torch.full_like(labels, -100))]))
    with pytest.raises(lapwing.BadData, match="no batch with a target that counts"):
        collect_draws(la.belief, Groups.scalar(la.params.size), stream, Nodes.spanning(1e-4, 1e5, 10.0), memory=2**30)


def test_segmentation() -> None:
    """Pixels with classes in the first dimension, 1,280 outputs per image: draws against the network alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 1))
        x, y = torch.randn(6, 1, 16, 16), torch.randint(5, (6, 16, 16))
    y[:, :4] = 255
    likelihood = lapwing.Categorical(class_dim=1, ignore_index=255)
    la = lapwing.fit(net, [(x, y)], likelihood, structure="kron", factor="mc")
    tuned = la.tune([(x, y)], grid={"prior": (1e8,)}, learn="prior")
    assert any("draws of f at 384 items of 6 data" in message for message in tuned.tuning.messages)  # 64 per image
    with torch.no_grad():
        own = nn.functional.cross_entropy(net(x), y, ignore_index=255)
    assert tuned.tuning.baselines["MAP"] == pytest.approx(own.item(), rel=0.05)  # an even part of the pixels
    assert tuned.tuning.score == pytest.approx(tuned.tuning.baselines["MAP"], abs=1e-3)


def test_rows_that_do_not_fit_are_refused_before_they_are_made() -> None:
    """A temperature curve takes rows of all outputs; 30,000 words × 20 tokens are too many for 1 GB."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4), nn.Linear(4, 30_000))
        ids = torch.randint(50, (2, 20))
    options = {"structure": "kron", "factor": "mc", "select": "1.*", "memory": 10**9}
    la = lapwing.fit(net, [(ids, ids)], "classification", **options)
    with pytest.raises(lapwing.TooLarge, match=r"rows of 600,000 outputs of one sample need .* GB.*memory="):
        la.temperature_curve([(ids, ids)])


VOCABULARY = """
import resource, torch, lapwing
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32000))
ids = torch.randint(50, (12, 6))
data = [(ids[:8], ids[:8] * 600), (ids[8:], ids[8:] * 600)]
la = lapwing.fit(model, data, "classification", structure="kron", factor="mc", select="1.*", memory=1_000_000_000)
model(ids[:1]).exp()  # what torch itself allocates at first use
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tuned = la.tune(data)
p = tuned.predict(ids[:8])
assert p.probs.shape == (8, 6, 32000)
lapwing.evaluate({"Laplace": tuned}, data)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(tuned.tuning.messages[-1])
"""


@pytest.mark.slow
def test_a_vocabulary_of_32000_stays_in_the_budget() -> None:
    """Tuning, prediction and evaluation with memory=1e9; a covariance of one token alone would take 4.1 GB."""
    grown, message = printed(VOCABULARY)
    assert int(grown) < 1_000_000  # in kB
    assert "draws of f at 72 items of 12 data" in message


def printed(script: str) -> list[str]:
    """Run a script in a process of its own, whose peak of memory is its own, and return what it prints."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


STORIES = """
import resource, time, torch, transformers, peft, lapwing
transformers.utils.logging.disable_progress_bar()
base = transformers.LlamaForCausalLM.from_pretrained(FOLDER)
torch.manual_seed(0)
model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
ones = torch.ones(64, 1, dtype=torch.long)
ids = model.generate(input_ids=ones, do_sample=True, max_new_tokens=24, min_new_tokens=24)
data = [{"input_ids": part, "labels": part} for part in ids.split(8)]
generator = torch.Generator().manual_seed(0)
la = lapwing.fit(
    model, data[:4], "classification", structure="kron", factor="mc", memory=2_000_000_000, generator=generator
)
begin = time.process_time()
tuned = la.tune(data[4:])
print(time.process_time() - begin)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(tuned.tuning.messages[-1])
"""


@pytest.mark.slow
@pytest.mark.data
def test_adapters_of_a_language_model_are_tuned_within_memory_and_time(data_dir: Path) -> None:
    """LoRA r = 2 on the 260k Llama, 32 sequences of 25 tokens, 512 words: within 2 GB in all and two minutes."""
    pytest.importorskip("peft")
    seconds, peak, message = printed(STORIES.replace("FOLDER", repr(str(data_dir / "tinystories-260k"))))
    assert float(seconds) < 120
    assert int(peak) < 2_000_000  # in kB, libraries and network included
    assert "draws of f at 768 items of 32 data" in message
