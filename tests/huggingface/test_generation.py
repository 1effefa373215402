"""Text by networks from the posterior."""

import os

import pytest
import torch
from torch import nn

import lapwing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers")
import lapwing.huggingface as door  # noqa: E402

IDS = torch.arange(48).reshape(8, 6) * 13 % 29 + 1


def fitted(prior: float) -> lapwing.Laplace:
    config = hf.LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(config)
    data = [{"input_ids": IDS, "labels": IDS}]
    return lapwing.fit(model, data, "classification", structure="diag", factor="mc", prior=prior)


def test_generation_runs_the_members_of_the_ensemble() -> None:
    """Greedy texts against a loop over forward passes at the same weights."""
    la = fitted(1.0)
    before = {name: p.detach().clone() for name, p in la.module.named_parameters()}
    prompt = {"input_ids": IDS[:2, :3], "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    texts = door.generate(la, prompt, samples=3, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(texts) == 3
    assert len({tuple(text.flatten().tolist()) for text in texts}) > 1
    for text, weights in zip(texts, la.ensemble(3)):
        ids = IDS[:2, :3]
        for _ in range(text.shape[1] - 3):
            logits = torch.func.functional_call(la.module, weights, (), {"input_ids": ids}).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(text, ids)
    assert all(torch.equal(p, before[name]) for name, p in la.module.named_parameters())


def test_a_narrow_posterior_says_what_the_model_says() -> None:
    la = fitted(1e12)
    prompt = {"input_ids": IDS[:1, :3], "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    own = la.module.eval().generate(**prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    for given in (prompt, prompt["input_ids"]):  # ids alone will do
        for text in door.generate(la, given, samples=2, max_new_tokens=5, do_sample=False, pad_token_id=0):
            assert torch.equal(text, own)


def test_a_model_that_does_not_speak() -> None:
    la = lapwing.fit(nn.Linear(2, 3), (torch.randn(6, 2), torch.arange(6) % 3), "classification", structure="diag")
    with pytest.raises(lapwing.UnsupportedModel, match="no method generate"):
        door.generate(la, {"x": torch.ones(1, 2)})
