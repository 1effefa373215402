"""Hugging Face models take their batch dicts, and mean by a label what their own loss means."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers")

IDS = torch.arange(48).reshape(8, 6) * 13 % 29 + 1
MASK = torch.ones(8, 6, dtype=torch.long)
MASK[::2, 4:] = 0
CLASSES = torch.arange(8) % 3


@pytest.fixture(autouse=True)
def quiet() -> None:
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()


def build(kind: str, config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(hf, kind)(config).double()


def bert(kind: str = "BertForSequenceClassification", labels: int = 3) -> nn.Module:
    config = hf.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, num_labels=labels,
    )  # fmt: skip
    return build(kind, config)


def gpt(kind: str = "GPT2LMHeadModel") -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16, num_labels=3,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return build(kind, config)


def llama(tied: bool = False) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return build("LlamaForCausalLM", config)


def language() -> list[dict[str, Tensor]]:
    """Two batches of text with padding, which has the label −100."""
    labels = IDS.masked_fill(MASK == 0, -100)
    whole = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    return [{key: value[rows] for key, value in whole.items()} for rows in (slice(0, 3), slice(3, 8))]


def require_own_loss(la: Laplace, batches: list[dict[str, Tensor]], counts: list[int]) -> None:
    """Σ log p = −Σ (mean loss of a batch × what it averages over); Hugging Face computes it in float32."""
    module = la.module.eval()
    with torch.no_grad():
        total = sum(float(module(**batch).loss) * count for batch, count in zip(batches, counts))
    assert la.log_likelihood.item() == pytest.approx(-total, rel=1e-6)


CAUSAL = {"gpt2": gpt, "llama": llama, "llama, tied": lambda: llama(tied=True)}


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_language_models_shift_labels_as_their_loss_does(name: str, structure: str) -> None:
    batches = language()
    la = lapwing.fit(
        CAUSAL[name](), batches, "classification", structure=structure, factor="mc",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    predicted = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    require_own_loss(la, batches, predicted)
    assert la.n_data == 8
    assert la.log_evidence().isfinite()


def test_the_exact_ggn_of_a_language_model_is_that_of_a_loop() -> None:
    """The last norm and its head against Σ_t Jᵀ Λ J over the positions that predict a token."""
    model, batches = llama(), language()
    la = lapwing.fit(model, batches, "classification", structure="full", select=["model.norm.weight"])
    truth = torch.zeros(8, 8, dtype=torch.float64)
    weight = model.model.norm.weight
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model.eval()(**inputs).logits
        for n, t in (batch["labels"][:, 1:] != -100).nonzero().tolist():
            f = logits[n, t]
            j = torch.stack([torch.autograd.grad(value, weight, retain_graph=True)[0] for value in f])
            p = f.detach().softmax(-1)
            truth += j.T @ (p.diag() - p[:, None] * p) @ j
    assert (la.curvature.dense() - truth).abs().max() < 1e-10 * truth.abs().max()


def test_predictions_of_a_language_model() -> None:
    model = llama()
    la = lapwing.fit(model, language(), "classification", structure="diag", factor="mc", prior=1e8)
    batch = language()[0]
    p = la.predict(batch, samples=4)  # labels are left unread
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    assert p.probs.shape == (3, 6, 30)
    assert torch.equal(p.function.mean, logits)
    assert torch.allclose(p.probs, logits.softmax(-1), atol=1e-3)
    shorter = {key: value[:, :4] for key, value in inputs.items()}
    assert la.predict(shorter, samples=2).probs.shape == (3, 4, 30)


def test_pairs_of_tokens_are_shifted_too() -> None:
    """(ids, ids) must not score each token on itself."""
    la = lapwing.fit(gpt(), [(IDS, IDS)], "classification", structure="diag", factor="mc")
    require_own_loss(la, [{"input_ids": IDS, "labels": IDS}], [8 * 5])


@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "ekfac", "lowrank"])
def test_sequence_classification(structure: str) -> None:
    model = bert().train()
    batch = hf.BatchEncoding({"input_ids": IDS, "attention_mask": MASK, "labels": CLASSES})
    la = lapwing.fit(model, [batch], "classification", structure=structure)
    assert model.training
    require_own_loss(la, [batch], [8])
    p = la.predict({"input_ids": IDS[:2], "attention_mask": MASK[:2]})
    assert p.probs.shape == (2, 3)
    assert torch.allclose(la.predict(batch).probs[:2], p.probs, rtol=1e-9)
    assert torch.allclose(torch.cat([q.probs for q in la.predict_loader([batch])])[:2], p.probs, rtol=1e-9)


def test_the_last_layer_is_the_classifier() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": CLASSES}
    la = lapwing.fit(bert(), [batch], "classification", select="last_layer")
    assert la.params.names == ("classifier.weight", "classifier.bias")
    decoder = lapwing.fit(gpt("GPT2ForSequenceClassification"), [batch], "classification", select="last_layer")
    assert decoder.params.names == ("score.weight",)
    require_own_loss(decoder, [batch], [8])
    assert decoder.n_data == 8


def test_token_classification_is_not_shifted() -> None:
    labels = (IDS % 3).masked_fill(MASK == 0, -100)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    la = lapwing.fit(bert("BertForTokenClassification"), [batch], "classification", structure="kron")
    require_own_loss(la, [batch], [int((labels != -100).sum())])
    assert la.predict({"input_ids": IDS[:2], "attention_mask": MASK[:2]}).probs.shape == (2, 6, 3)


def test_regression_head() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS[:, 0].double() / 30}
    la = lapwing.fit(bert(labels=1), [batch], lapwing.Gaussian(0.5), structure="kron")
    p = la.predict({"input_ids": IDS[:2], "attention_mask": MASK[:2]})
    assert p.variance.shape == (2, 1)
    assert (p.variance > 0.25).all()


def test_a_batch_without_labels_says_so() -> None:
    with pytest.raises(lapwing.BadData, match=r"keys \['input_ids'\] and none of \['labels'"):
        lapwing.fit(gpt(), [{"input_ids": IDS}], "classification")


def test_saved_and_loaded(tmp_path: Path) -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": CLASSES}
    la = lapwing.fit(bert(), [batch], "classification", structure="kron").tune(
        [batch], grid={"prior": [1.0, 10.0]}, learn="prior"
    )
    la.save(tmp_path / "bert")
    back = lapwing.load(tmp_path / "bert", bert())
    assert torch.equal(back.predict(batch).probs, la.predict(batch).probs)


def test_lora_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        gpt(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    ).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).reshape(p.shape))
    batches = language()
    la = lapwing.fit(model, batches, "classification", structure="full", factor="mc")
    assert all("lora" in name for name in la.params.names)
    assert len(la.params.names) == 2
    require_own_loss(la, batches, [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches])


@pytest.mark.data
def test_the_real_llama(data_dir: Path) -> None:
    model = hf.LlamaForCausalLM.from_pretrained(data_dir / "tinystories-260k")
    tokenizer = hf.AutoTokenizer.from_pretrained(data_dir / "tinystories-260k")
    texts = ["Once upon a time, there was a little girl named Lily.", "The dog ran to the park and saw a big red ball."]
    rows = [torch.tensor(tokenizer(text)["input_ids"][:14]) for text in texts]
    ids = torch.stack([nn.functional.pad(row, (0, 14 - len(row))) for row in rows])
    used = torch.stack([torch.arange(14) < len(row) for row in rows])
    batch = {"input_ids": ids, "attention_mask": used.long(), "labels": ids.masked_fill(~used, -100)}
    with pytest.raises(lapwing.TooLarge, match=r"output directions .*factor='mc'"):
        lapwing.fit(model, [batch], "classification", structure="kron")
    la = lapwing.fit(
        model, [batch], "classification", structure="kron", factor="mc", generator=torch.Generator().manual_seed(0)
    )
    assert la.params.size == 260_032
    count = int((batch["labels"][:, 1:] != -100).sum())
    require_own_loss(la, [batch], [count])
    assert -la.log_likelihood.item() / count < 3.5  # of ln 512 = 6.2: it has learnt stories
    p = la.replace(prior=1e4).predict({"input_ids": ids[:1, :4]}, samples=2)
    assert p.probs.shape == (1, 4, 512)
    assert torch.allclose(p.probs.sum(-1), torch.ones(1, 4), atol=1e-4)
