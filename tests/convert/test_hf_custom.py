"""Models of ours as Hugging Face models: custom ones, which need transformers alone, and those that are a Mixtral."""

import hashlib
import json
import shutil
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hf_cases import convert, hf_logits, native, read_folder, refusal, set_config
from torch import nn

from openlm_moe import MoEConfig
from openlm_moe.data.corpus import embedded_tokenizer
from openlm_moe.data.tokenizer import load_encoder
from openlm_moe.hosts.builtin.generate import generate
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.hosts.builtin.saving import CHECKPOINTS
from openlm_moe.parallel import Checkpointer

pytest.importorskip("transformers", minversion="5.0")
VOCAB, CONTEXT = 47, 24
PLAIN = {"dim": 30, "n_layers": 3, "n_heads": 5, "seq_len": CONTEXT, "vocab_size": VOCAB}
# What the trainer makes by default, then every kind of part, most of them twice.
MODELS = {
    "defaults": ({}, {"num_experts": 5}),
    "qk-norm, tied, shared expert": (
        {"qk_norm": True, "weight_tying": True, "model_norm": "gain_only_lp_layer_norm", "n_kv_heads": 1},
        {"num_experts": 4, "ffn": "swiglu", "ffn_dim": 11, "shared_experts": 2, "layers": (1, 2), "top_k": 3},
    ),
    "sigmoid, bias, gelu": (
        {"ffn_type": "gelu", "model_norm": "no_wb_layer_norm", "positional_embedding_type": "llama_rotary"},
        {"num_experts": 4, "score": "sigmoid", "balance": "bias", "normalize_weights": True, "ffn_dim": 13},
    ),
    "post-embedding norm, geglu": (
        {"ffn_type": "gemma_geglu", "post_embed_norm": True, "positional_embedding_type": "head_rotary"},
        {"num_experts": 3, "top_k": 1, "shared_experts": 1},
    ),
    "rms norm, no positions": (
        {"model_norm": "rms_norm", "positional_embedding_type": "none", "norm_eps": 1e-2, "dim": 33, "qk_norm": True},
        {"num_experts": 4, "every": 1, "ffn": "swiglu", "ffn_dim": 10},
    ),
    "dense": ({"model_norm": "gain_only_layer_norm", "rope_theta": 77.0, "weight_tying": True}, {"num_experts": 0}),
}


def save_run(folder, shape, moe):
    """A run's folder with one checkpoint as the trainer saves it, and the model, with decided answers."""
    params, moe = ModelParams(**PLAIN | shape), MoEConfig(**moe)
    model = Transformer(params, moe)
    model.init_weights(0)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "bias" in name:
            nn.init.normal_(value, mean=1.0 if name.endswith("weight") else 0.0, std=0.3)
        elif "attention" not in name:
            value.data *= 2
    writer = Checkpointer(folder / CHECKPOINTS, asynchronous=False)
    writer.save(100, model, None, {"step": 100, "model": params.to_json(), "moe": moe.to_dict()})
    writer.close()
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|endoftext|>", "id": 4}]}')
    return model.eval()


WITHOUT_US = """
import json, sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("openlm_moe", "openlm_moe_kernels"):
            raise ImportError(name + " is not to be imported")

sys.meta_path.insert(0, Refusing())
import torch
from transformers import AutoConfig, AutoModelForCausalLM

out = {}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    tokens = torch.tensor(json.load(open(sys.argv[1])))
    how = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(tokens).logits
        loss = model(tokens, labels=tokens).loss
    again = [model.generate(tokens[:, :7], use_cache=cache, **how) for cache in (True, False)]
    # the same prompts in a batch with a longer one, padded at the left
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), tokens[:2, :7]], dim=1)
    batch = torch.cat([padded, tokens[:1, :11]])
    left = model.generate(batch, attention_mask=(torch.arange(11) >= torch.tensor([[4], [4], [0]])).long(), **how)
    with torch.no_grad():  # as a caller does it who gives no positions: one batch plain, one padded at the left
        first = model(tokens[:, :7], use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"
        pieces = [first.logits]
        for piece in tokens[:, 7:].split((5, 1, 11), dim=1):
            pieces.append(model(piece, **{name: first[name]}).logits)
        shifted = torch.cat([torch.zeros(3, 4, dtype=torch.long), tokens], dim=1)
        seen = (torch.arange(shifted.shape[1]) >= 4).long().expand(3, -1)
        first = model(shifted[:, :9], attention_mask=seen[:, :9], use_cache=True)
        rest = model(shifted[:, 9:], attention_mask=seen, **{name: first[name]}).logits
    beams = model.generate(tokens[:1, :7], num_beams=3, **how)
    half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    out[folder] = {
        "logits": logits.tolist(),
        "pieces": torch.cat(pieces, dim=1).tolist(),
        "shifted": torch.cat([first.logits[:, 4:], rest], dim=1).tolist(),
        "loss": float(loss),
        "generated": [g.tolist() for g in again],
        "left": left[:2, 4:].tolist(),
        "beams": list(beams.shape),
        "routers": sorted({str(p.dtype) for n, p in half.named_parameters() if "router" in n}),
        "others": sorted({str(p.dtype) for n, p in half.named_parameters() if "router" not in n}),
        "tied": model.output.weight is model.tok_embeddings.weight,
    }
assert not any(name.startswith("openlm_moe") for name in sys.modules)
json.dump(out, sys.stdout)
"""


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """name -> (our model, exported folder, what transformers alone makes of that folder), and the tokens."""
    home = tmp_path_factory.mktemp("custom")
    models = {name: save_run(home / name, *settings) for name, settings in MODELS.items()}
    for name in MODELS:
        convert("openlm-to-hf", home / name, home / f"{name} out")
    # 0 pads below, and transformers takes it for padding inside a prompt too
    tokens = torch.randint(1, VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(3))
    (home / "tokens.json").write_text(json.dumps(tokens.tolist()))
    folders = [str(home / f"{name} out") for name in MODELS]
    env = {"HF_HOME": str(home / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = run([sys.executable, "-W", "ignore", "-c", WITHOUT_US, home / "tokens.json", *folders], env=env, cwd=home)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return {name: (models[name], home / f"{name} out", said[f"{home / name} out"]) for name in MODELS}, tokens


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_ours_without_our_package(exported, name):
    found, tokens = exported
    model, _, said = found[name]
    with torch.no_grad():
        ours = model(tokens)
    for way in ("logits", "pieces", "shifted"):
        theirs = torch.tensor(said[way])
        assert (ours - theirs).abs().amax(-1).max() <= 1e-5 * ours.abs().max(), way
    loss = nn.functional.cross_entropy(ours[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert said["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_and_without_cache_continues_as_ours(exported, name):
    found, tokens = exported
    model, _, said = found[name]
    ours = [[*prompt, *generate(model, prompt, 9, temperature=0)] for prompt in tokens[:, :7].tolist()]
    cached, uncached = said["generated"]
    assert cached == uncached == ours
    assert said["left"] == ours[:2]
    assert said["beams"] == [1, 16]


@pytest.mark.parametrize("name", MODELS)
def test_routers_stay_in_fp32_in_a_bf16_model(exported, name):
    model, _, said = exported[0][name]
    assert said["routers"] == (["torch.float32"] if model.moe.num_experts else [])
    assert said["others"] == ["torch.bfloat16"]
    assert said["tied"] == model.params.weight_tying


@pytest.mark.parametrize("name", MODELS)
def test_custom_model_comes_back(exported, name, tmp_path):
    model, folder, _ = exported[0][name]
    convert("hf-to-openlm", folder, tmp_path / "ours")
    back = native(tmp_path / "ours")
    assert back.params == model.params
    assert back.moe.moe_layer_ids(3) == model.moe.moe_layer_ids(3)
    ours, theirs = model.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    convert("openlm-to-hf", tmp_path / "ours", tmp_path / "again")
    first, second = read_folder(folder), read_folder(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "again/config.json").read_text())


def test_end_token_is_the_tokenizers(exported):
    config = json.loads((exported[0]["defaults"][1] / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (4, None)


def test_tokenizer_of_the_embedded_corpus_goes_along(tmp_path):
    from transformers import AutoTokenizer

    file = Path(embedded_tokenizer())
    save_run(tmp_path / "run", {}, {"num_experts": 4})
    (tmp_path / "run" / "tokenizer.json").unlink()
    record = {"corpus": {"tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}}
    (tmp_path / "run" / "params.json").write_text(json.dumps(record))
    convert("openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == file.read_bytes()
    encoder = load_encoder(str(file))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == encoder.end_id
    found = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    text = "def read(self, size=-1):"
    assert found.encode(text) == encoder.tokenizer.encode(text).ids
    assert found.eos_token_id == encoder.end_id
    record["corpus"]["tokenizer_sha256"] = "of another Python's library"
    (tmp_path / "run" / "params.json").write_text(json.dumps(record))
    convert("openlm-to-hf", tmp_path / "run", tmp_path / "without")
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def test_custom_fields_that_are_wrong(exported, tmp_path, capsys):
    shutil.copytree(exported[0]["defaults"][1], tmp_path / "hf")
    for fields, words in (
        ({"hidden_size": "thirty"}, "of the wrong type"),
        ({"norm": "batch_norm"}, "model_norm is 'batch_norm'"),
        ({"dense_ffn": "gelu"}, "lacks layers.1.feed_forward.0.weight"),
    ):
        before = (tmp_path / "hf" / "config.json").read_text()
        set_config(tmp_path / "hf", **fields)
        assert words in refusal(capsys, "hf-to-openlm", tmp_path / "hf", tmp_path / "ours")
        (tmp_path / "hf" / "config.json").write_text(before)


ALL_SWIGLU = {"num_experts": 4, "every": 1, "ffn": "swiglu", "ffn_dim": 14, "normalize_weights": True}


@pytest.mark.parametrize("dim", [30, 33])  # 33 // 5 leaves a rest
def test_all_swiglu_layers_with_normalised_weights_are_a_mixtral(tmp_path, dim):
    shape = {"model_norm": "rms_norm", "rope_theta": 500.0, "norm_eps": 1e-3, "dim": dim}
    model = save_run(tmp_path / "run", shape, ALL_SWIGLU)
    convert("openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mixtral"
    assert not list((tmp_path / "hf").glob("*.py"))
    tokens = torch.randint(VOCAB, (2, CONTEXT))
    with torch.no_grad():
        ours = model(tokens)
    assert (hf_logits(tmp_path / "hf", tokens) - ours).abs().amax(-1).max() <= 1e-5 * ours.abs().max()


@pytest.mark.parametrize(
    ("shape", "moe", "words"),
    [
        ({}, {}, "model_norm is 'default_layer_norm', not 'rms_norm'"),
        ({"model_norm": "rms_norm"}, {"every": 2}, "MoE layers is [0, 2], not [0, 1, 2]"),
        ({"model_norm": "rms_norm"}, {"normalize_weights": False}, "normalize_weights is False, not True"),
        ({"model_norm": "rms_norm"}, {"balance": "bias"}, "balance is 'bias'"),
    ],
)
def test_what_is_no_mixtral_says_why(tmp_path, capsys, shape, moe, words):
    save_run(tmp_path / "run", shape, ALL_SWIGLU | moe)
    assert words in refusal(capsys, "openlm-to-hf", tmp_path / "run", tmp_path / "hf", "--format", "mixtral")


@pytest.mark.parametrize(
    ("moe", "words"),
    [({"moe_type": "capacity"}, "moe_type is 'capacity'"), ({"uniform_routing": True}, "uniform_routing is True")],
)
def test_layers_that_look_at_the_whole_batch_are_not_exported(tmp_path, capsys, moe, words):
    save_run(tmp_path / "run", {}, {"num_experts": 4, **moe})
    assert words in refusal(capsys, "openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_checkpoints_without_a_model_of_ours(tmp_path, capsys):
    save_run(tmp_path / "run", {}, {"num_experts": 4})
    state = tmp_path / "run" / CHECKPOINTS / "step_0000100" / "state.json"
    whole = json.loads(state.read_text())
    state.write_text(json.dumps({"step": 100}))
    assert "does not say what model it is of" in refusal(capsys, "openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    state.write_text(json.dumps(whole | {"model": {"family": "mixtral"}}))
    assert "trained by --hf-model" in refusal(capsys, "openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    state.write_text(json.dumps(whole | {"model": whole["model"] | {"n_layers": 2}}))
    assert "state.json is not as it was written" in refusal(capsys, "openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    marker = state.with_name("COMPLETE")
    files = json.loads(marker.read_text())["files"]
    files["state.json"] = [state.stat().st_size, zlib.crc32(state.read_bytes())]
    marker.write_text(json.dumps({"files": files}))
    said = refusal(capsys, "openlm-to-hf", tmp_path / "run", tmp_path / "hf")
    assert "holds, without a use for them, layers.2.attention.in_proj.weight" in said


def test_tensors_of_two_dtypes_start_at_multiples_of_their_items(tmp_path):
    """33 numbers of two bytes each, and a router of four: as the library lays files out, which readers rely on."""
    shape, moe = MODELS["rms norm, no positions"]
    model = save_run(tmp_path / "run", shape, moe)
    convert("openlm-to-hf", tmp_path / "run", tmp_path / "hf", "--dtype", "bf16")
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        item = {"F32": 4, "BF16": 2}[entry["dtype"]]
        assert (item == 4) == name.endswith("router.weight")
        assert (8 + length + entry["data_offsets"][0]) % item == 0
    for name, value in read_folder(tmp_path / "hf").items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype))
