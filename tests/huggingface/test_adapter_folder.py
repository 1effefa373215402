"""Posteriors over PEFT adapters: kept in the adapter's folder, found under any name, beside any other adapter."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
import lapwing.huggingface as door  # noqa: E402

IDS = torch.arange(48).reshape(8, 6) * 13 % 29 + 1
LABELS = IDS.masked_fill(IDS % 7 == 0, -100)
BATCH = {"input_ids": IDS, "labels": LABELS}


@pytest.fixture(autouse=True)
def quiet() -> None:
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()


def base(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return hf.LlamaForCausalLM(config).to(dtype)


def config(rank: int = 2, modules: tuple[str, ...] = ("q_proj", "v_proj")) -> Any:
    return peft.LoraConfig(r=rank, target_modules=list(modules), task_type="CAUSAL_LM", init_lora_weights=False)


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return peft.get_peft_model(base(dtype), config())


def fitted(model: nn.Module, **options: Any) -> lapwing.Laplace:
    generator = torch.Generator().manual_seed(0)
    return lapwing.fit(model, [BATCH], "classification", structure="kron", factor="mc", generator=generator, **options)


def probs(la: lapwing.Laplace) -> Tensor:
    return la.predict({"input_ids": IDS}, samples=8).probs


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Tensor]:
    model = adapted()
    la = fitted(model, prior={"*lora_A*": 30.0, "*lora_B*": 3.0})
    model.save_pretrained(tmp_path)
    assert door.save(la, tmp_path) == tmp_path / door.FILE
    return tmp_path, probs(la)


def test_found_under_any_name(folder: tuple[Path, Tensor]) -> None:
    path, expected = folder
    la = door.load(path, peft.PeftModel.from_pretrained(base(), path, adapter_name="mine"))
    assert all(".mine." in name for name in la.params.names)
    assert torch.equal(probs(la), expected)


def test_names_in_the_file_are_those_of_the_adapters_own_file(folder: tuple[Path, Tensor]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path, _ = folder
    _, header = lapwing.storage.read_file(path / door.FILE)
    own = safetensors.load_file(path / "adapter_model.safetensors")
    assert set(header["parameters"]) == set(own)
    assert ".default" not in str({key: value for key, value in header.items() if key != "written"})


def test_other_adapters_do_not_count(folder: tuple[Path, Tensor]) -> None:
    path, expected = folder
    model = peft.PeftModel.from_pretrained(base(), path)
    before = door.load(path, model)
    model.add_adapter("other", config(4, ("k_proj", "q_proj")))
    model.set_adapter("default")
    assert torch.equal(probs(door.load(path, model)), expected)
    assert torch.equal(probs(before), expected)  # a posterior in memory does not mind either
    model.set_adapter("other")
    with pytest.raises(lapwing.UnsupportedModel, match="changed since the fit"):
        probs(before)
    with pytest.raises(lapwing.UnsupportedModel, match=r"'default' is not active: model\.set_adapter\('default'\)"):
        door.load(path, model, adapter="default")
    with pytest.raises(lapwing.UnsupportedModel, match="which adapter 'other' lacks"):
        door.load(path, model)
    model.set_adapter("default")
    assert torch.equal(probs(before), expected)


def bump(model: nn.Module, part: str) -> None:
    name = next(name for name, _ in model.named_parameters() if part in name)
    with torch.no_grad():
        model.get_parameter(name).add_(0.01)


def scale(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(getattr(part, "scaling", None), dict):
            part.scaling["default"] = 20.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: bump(model, "lora_A.default"), "adapter 'default' has other weights"),
        (lambda model: bump(model, "embed_tokens"), "the base model has other weights"),
        (lambda model: bump(model, "base_layer"), "the base model has other weights"),
        (lambda model: model.to(torch.float64), "another dtype"),
        (scale, "adapter 'default' has other weights"),
    ],
)
def test_other_weights_are_refused(folder: tuple[Path, Tensor], change: Any, told: str) -> None:
    path, _ = folder
    model = peft.PeftModel.from_pretrained(base(), path)
    change(model)
    with pytest.raises(lapwing.UnsupportedModel, match=told):
        door.load(path, model)


def test_what_is_no_adapter(folder: tuple[Path, Tensor], tmp_path: Path) -> None:
    path, _ = folder
    plain = base()
    la = lapwing.fit(plain, [BATCH], "classification", structure="diag", factor="mc", select="lm_head.weight")
    with pytest.raises(lapwing.UnsupportedModel, match=r"one PEFT adapter, but no selected weight .* la\.save"):
        door.save(la, path)
    with pytest.raises(lapwing.UnsupportedModel, match="expected one active adapter"):
        door.load(path, plain)
    with pytest.raises(lapwing.BadData, match=r"there is no .posterior\.lapwing."):
        door.load(tmp_path / "nowhere", plain)
    with pytest.raises(lapwing.BadData, match="save the adapter first"):
        door.save(fitted(adapted()), tmp_path / "nowhere")


def test_frozen_adapters_take_part_where_select_names_them(folder: tuple[Path, Tensor]) -> None:
    path, expected = folder
    model = peft.PeftModel.from_pretrained(base(), path)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(lapwing.BadData, match="every parameter of the model is frozen"):
        fitted(model)
    names = [name for name, _ in model.named_parameters() if "lora" in name]
    for select in ("*lora*", names):
        la = fitted(model, select=select, prior={"*lora_A*": 30.0, "*lora_B*": 3.0})
        assert torch.allclose(probs(la), expected)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(lapwing.BadData, match="frozen"):
        fitted(model, select=["base_model.model.lm_head.weight"])
    model.load_adapter(path, "idle")
    assert len(fitted(model, select="*lora*").params.names) == len(names)


def test_float32_adapters_on_a_base_in_bfloat16(tmp_path: Path) -> None:
    model = adapted(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    la = fitted(model, prior=10.0)
    assert la.params.dtype == torch.float32
    with torch.no_grad():
        loss = model.eval()(**BATCH).loss
    count = int((LABELS[:, 1:] != -100).sum())
    assert -la.log_likelihood.item() / count == pytest.approx(loss.item(), rel=1e-2)
    model.save_pretrained(tmp_path)
    door.save(la, tmp_path)
    back = door.load(tmp_path, peft.PeftModel.from_pretrained(base(torch.bfloat16), tmp_path, adapter_name="b"))
    assert torch.equal(probs(back), probs(la))
    assert (la.predict({"input_ids": IDS}).function.variance > 0).all()


def test_log_prob_shifts_labels_as_the_loss_does() -> None:
    model = adapted()
    la = fitted(model, prior=1e8)
    with torch.no_grad():
        loss = model.eval()(**BATCH).loss.item()
    log_prob = la.predict(BATCH, samples=4).log_prob(LABELS)
    count = int((LABELS[:, 1:] != -100).sum())
    assert -log_prob.sum().item() / count == pytest.approx(loss, rel=1e-4)
    members = la.ensemble(2).predict(BATCH).log_prob(LABELS)
    assert -members.sum().item() / count == pytest.approx(loss, rel=1e-3)
