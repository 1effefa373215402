"""Labels mean what they mean to the loss that the network itself returns, whatever its class is called."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers")

SIZE, TOKENS = 13, torch.randint(4, 13, (4, 6), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill((torch.arange(24).reshape(4, 6) % 7) == 1, -100)
ANSWERS = torch.randint(4, 13, (4, 5), generator=torch.Generator().manual_seed(1))
ANSWERS[1, 3:] = -100
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "vocab_size": SIZE, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 20, **SPECIAL,
}  # fmt: skip
BART = {
    "vocab_size": SIZE, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16,
    "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
GPT = {"vocab_size": SIZE, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "num_labels": SIZE, **SPECIAL}
T5 = {
    "vocab_size": SIZE, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
TEXT = {"input_ids": TOKENS, "labels": LABELS}
TRANSLATED = {"input_ids": TOKENS, "labels": ANSWERS}


@pytest.fixture(autouse=True)
def quiet() -> None:
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()


def build(kind: str, config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(hf, kind)(config).double().eval()
        for p in model.parameters():  # losses far from log 13, and from each other
            nn.init.normal_(p, std=0.5) if p.ndim > 1 else None
    return model


def bert_to_bert() -> nn.Module:
    encoder, decoder = hf.BertConfig(**ENCODER), hf.BertConfig(is_decoder=True, add_cross_attention=True, **ENCODER)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return build("EncoderDecoderModel", config)


MODELS: dict[str, tuple[Any, dict[str, Tensor], bool]] = {
    "causal": (lambda: build("GPT2LMHeadModel", hf.GPT2Config(**GPT)), TEXT, True),
    "causal with two heads": (lambda: build("GPT2DoubleHeadsModel", hf.GPT2Config(**GPT)), TEXT, True),
    "causal, named a decoder": (
        lambda: build("BertGenerationDecoder", hf.BertGenerationConfig(is_decoder=True, **ENCODER)),
        TEXT,
        True,
    ),
    "named causal, not moved": (lambda: build("BartForCausalLM", hf.BartConfig(**BART)), TEXT, False),
    "permuted": (
        lambda: build("XLNetLMHeadModel", hf.XLNetConfig(vocab_size=SIZE, d_model=8, n_layer=1, n_head=2, d_inner=8)),
        TEXT,
        False,
    ),
    "tagger": (lambda: build("GPT2ForTokenClassification", hf.GPT2Config(**GPT)), TEXT, False),
    "masked": (lambda: build("BertForMaskedLM", hf.BertConfig(**ENCODER)), TEXT, False),
    "T5": (lambda: build("T5ForConditionalGeneration", hf.T5Config(**T5)), TRANSLATED, False),
    "Bart": (lambda: build("BartForConditionalGeneration", hf.BartConfig(**BART)), TRANSLATED, False),
    "Bart, as long": (
        lambda: build("BartForConditionalGeneration", hf.BartConfig(**BART)),
        {"input_ids": TOKENS, "labels": TOKENS.flip(1)},
        False,
    ),
    "Bert to Bert": (bert_to_bert, TRANSLATED, False),
}


def smallest(model: nn.Module) -> list[str]:
    return [min((p.numel(), name) for name, p in model.named_parameters() if p.requires_grad)[1]]


def fit(model: nn.Module, data: Any, **options: Any) -> lapwing.Laplace:
    options = {"structure": "diag", "select": smallest(model), "factor": "mc", "prior": 1e12} | options
    return lapwing.fit(model, data, "classification", generator=torch.Generator().manual_seed(0), **options)


def moved(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(model(**batch).loss)


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_likelihood_is_that_of_the_models_own_loss(name: str, tmp_path: Path) -> None:
    make, batch, shifted = MODELS[name]
    model = make()
    la = fit(model, [batch])
    count = int(((moved(batch["labels"]) if shifted else batch["labels"]) != -100).sum())
    loss = own_loss(model, batch)
    assert -la.log_likelihood.item() / count == pytest.approx(loss, rel=1e-6)
    assert la.options.convention.shifted is shifted
    la.save(tmp_path / "file")
    for posterior in (la, lapwing.load(tmp_path / "file", model)):
        p = posterior.predict(batch, samples=2)
        assert -p.log_prob(batch["labels"]).sum().item() / count == pytest.approx(loss, rel=1e-4)
        with torch.no_grad():
            assert torch.allclose(p.function.mean, model(**batch).logits)
        twice = posterior.update([batch])
        assert -twice.log_likelihood.item() / (2 * count) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", ["causal", "T5"])
def test_reports_score_labels_the_same_way(name: str) -> None:
    make, batch, _ = MODELS[name]
    model = make()
    few = {key: value[:2] for key, value in batch.items()}
    la = fit(model, [batch])
    rows = {"MAP": model, "Laplace": la, "mixture": lapwing.Mixture([la, la]), "ensemble": la.ensemble(2)}
    report = lapwing.evaluate(rows, [few], likelihood="classification").to_dict()
    for result in report["models"].values():
        assert result["nll"] == pytest.approx(own_loss(model, few), rel=1e-4)


@pytest.mark.parametrize("name", ["causal", "tagger"])
def test_a_batch_that_cannot_tell_leaves_the_question_open(name: str) -> None:
    make, batch, shifted = MODELS[name]
    ignored = {"input_ids": TOKENS, "labels": torch.full_like(TOKENS, -100)}
    model = make()
    assert fit(model, [ignored]).options.convention.shifted is None
    la = fit(model, [ignored, batch])
    assert la.options.convention.shifted is shifted
    count = int(((moved(LABELS) if shifted else LABELS) != -100).sum())
    assert -la.log_likelihood.item() / count == pytest.approx(own_loss(model, batch), rel=1e-6)


@pytest.mark.parametrize("form", ["tensors", "mapping", "lists", "array"])
@pytest.mark.parametrize("name", ["causal", "named causal, not moved"])
def test_other_forms_of_the_same_batch(name: str, form: str) -> None:
    make, _, shifted = MODELS[name]
    model = make()
    batch: Any = {
        "tensors": (TOKENS, TOKENS),
        "mapping": ({"input_ids": TOKENS}, TOKENS),
        "lists": {"input_ids": TOKENS, "labels": TOKENS.tolist()},
        "array": {"input_ids": TOKENS.numpy(), "labels": TOKENS.numpy()},
    }[form]
    la = fit(model, [batch])
    count = 4 * (5 if shifted else 6)
    loss = own_loss(model, {"input_ids": TOKENS, "labels": TOKENS})
    assert -la.log_likelihood.item() / count == pytest.approx(loss, rel=1e-6)
    p = la.predict({"input_ids": TOKENS}, samples=2)
    assert -p.log_prob(TOKENS.tolist()).sum().item() / count == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("name", ["causal", "T5"])
def test_labels_of_fewer_bits(name: str) -> None:
    make, batch, _ = MODELS[name]
    model = make()
    la = fit(model, [{**batch, "labels": batch["labels"].int()}])
    assert torch.equal(la.log_likelihood, fit(model, [batch]).log_likelihood)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.double])
def test_several_labels_per_sample_are_no_tokens(dtype: torch.dtype) -> None:
    config = hf.BertConfig(**ENCODER, num_labels=3, problem_type="multi_label_classification")
    model = build("BertForSequenceClassification", config)
    labels = TOKENS[:, :3] > 8
    options = {"structure": "diag", "select": smallest(model)}
    la = lapwing.fit(model, [{"input_ids": TOKENS, "labels": labels.to(dtype)}], "binary", **options)
    loss = own_loss(model, {"input_ids": TOKENS, "labels": labels.double()})
    assert -la.log_likelihood.item() / labels.numel() == pytest.approx(loss, rel=1e-6)


def test_a_sequence_of_one_token_predicts_nothing() -> None:
    make, batch, _ = MODELS["causal"]
    one = {"input_ids": TOKENS[:, :1], "labels": TOKENS[:, :1]}
    la = fit(make(), [one, batch])
    assert la.options.convention.shifted
    assert la.log_likelihood == pytest.approx(fit(make(), [batch]).log_likelihood.item(), rel=1e-9)


class Custom(nn.Module):
    """A tagger with a loss of its own."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(SIZE, 6), nn.Linear(6, SIZE), loss

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        f = self.head(self.embedding(ids))
        if labels is None:
            return {"logits": f}
        return {"logits": f, "loss": self.loss(f.flatten(0, 1), labels.flatten())}


def test_a_loss_that_is_neither() -> None:
    torch.manual_seed(0)
    model = Custom(nn.CrossEntropyLoss(label_smoothing=0.3)).double()
    batch = {"ids": TOKENS, "labels": LABELS}
    f = model(TOKENS)["logits"].detach().mT
    as_is, ahead = (float(nn.functional.cross_entropy(f, y)) for y in (LABELS, moved(LABELS)))
    with pytest.raises(lapwing.BadData, match=r"batch 0: the loss that the network returns .* split=") as found:
        fit(model, [batch])
    assert f"{as_is:.6g}" in str(found.value)
    assert f"{ahead:.6g}" in str(found.value)
    given = fit(model, [batch], split=lambda b: ({"ids": b["ids"]}, b["labels"]))
    assert -given.log_likelihood.item() / int((LABELS != -100).sum()) == pytest.approx(as_is)


def test_a_loss_that_is_both() -> None:
    model = Custom(nn.CrossEntropyLoss()).double()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    with pytest.raises(lapwing.BadData, match="it is both of these"):
        fit(model, [{"ids": TOKENS, "labels": LABELS}])


def test_a_loss_that_fails() -> None:
    model = Custom(nn.CrossEntropyLoss()).double()
    with pytest.raises(lapwing.BadData, match="its loss fails for these labels"):
        fit(model, [{"ids": TOKENS, "labels": LABELS.masked_fill(LABELS == -100, 99)}])


def test_a_network_without_a_loss_is_taken_at_its_word() -> None:
    class Plain(Custom):
        def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
            return self.head(self.embedding(ids))

    torch.manual_seed(0)
    model = Plain(None).double()
    la = fit(model, [{"ids": TOKENS, "labels": LABELS}])
    truth = nn.functional.cross_entropy(model(TOKENS).mT, LABELS, reduction="sum").item()
    assert -la.log_likelihood.item() == pytest.approx(truth)


@pytest.mark.parametrize("name", ["T5", "Bart, as long"])
def test_decoder_inputs_from_labels_need_labels(name: str) -> None:
    make, batch, _ = MODELS[name]
    la = fit(make(), [batch])
    with pytest.raises(lapwing.BadData, match="makes decoder inputs from 'labels'"):
        la.predict({"input_ids": TOKENS})


def test_decoder_inputs_in_place_of_labels() -> None:
    make, batch, _ = MODELS["T5"]
    model = make()
    la = fit(model, [batch])
    with_inputs = {"input_ids": TOKENS, "decoder_input_ids": model._shift_right(ANSWERS)}
    assert torch.allclose(la.predict(with_inputs).function.mean, la.predict(batch).function.mean)
    given = fit(model, [{**with_inputs, "labels": ANSWERS}])
    assert given.options.convention.entry == ""
    assert torch.allclose(given.log_likelihood, la.log_likelihood)


def test_rows_of_a_decoder_whose_inputs_come_from_labels() -> None:
    """Σ JᵀΛJ of the last norm, position by position."""
    make, batch, _ = MODELS["T5"]
    model = make()
    name = "decoder.final_layer_norm.weight"
    la = fit(model, [batch], select=[name], structure="full", factor="ggn")
    weight, truth = dict(model.named_parameters())[name], torch.zeros(8, 8, dtype=torch.float64)
    logits = model(**batch).logits
    for n, t in (ANSWERS != -100).nonzero().tolist():
        j = torch.stack([torch.autograd.grad(value, weight, retain_graph=True)[0] for value in logits[n, t]])
        p = logits[n, t].detach().softmax(-1)
        truth += j.T @ (p.diag() - p[:, None] * p) @ j
    assert (la.curvature.dense() - truth).abs().max() < 1e-8 * truth.abs().max()
