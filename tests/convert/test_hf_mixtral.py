"""Mixtral both ways: the same logits in the built-in model, every tensor back bit by bit, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_cases import (
    CONTEXT,
    VOCAB,
    convert,
    hf_logits,
    make_mixtral,
    native,
    read_folder,
    refusal,
    set_config,
)

from openlm_moe.data.manifest import write_manifest
from openlm_moe.data.shards import write_shard
from openlm_moe.hosts.builtin.saving import find_checkpoint
from openlm_moe.main import main as train
from openlm_moe.parallel.checkpoint import read_checked_index

pytest.importorskip("transformers", minversion="5.0")


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Our tensor -> dtype in the checkpoint."""
    index = read_checked_index(find_checkpoint(str(folder)))
    return {n.removeprefix("model."): e.properties.dtype for n, e in index.state_dict_metadata.items()}


@pytest.mark.parametrize("stacked", [False, True], ids=["files' names", "stacked names"])
def test_logits_equal_transformers_at_every_position(mixtral, tmp_path, stacked):
    source = make_mixtral(tmp_path / "hf", stacked=True) if stacked else mixtral
    convert("hf-to-openlm", source, tmp_path / "ours")
    model = native(tmp_path / "ours")
    tokens = torch.randint(VOCAB, (2, CONTEXT))
    with torch.no_grad():
        ours = model(tokens)
    theirs = hf_logits(source, tokens)
    assert (ours - theirs).abs().amax(-1).max() <= 1e-5 * theirs.abs().max()
    assert theirs.std() > 0.1
    params = model.params
    assert (params.kv_heads, params.rope_theta, params.norm_eps, params.seq_len) == (2, 5e4, 1e-4, CONTEXT)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.every, model.moe.normalize_weights) == (5, 3, 1, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stacked", [False, True], ids=["files' names", "stacked names"])
def test_round_trip_is_bitwise(dtype, stacked, tmp_path):
    """In shards, both ways; the router is fp32 with us, and comes back in the dtype that is asked for."""
    source = make_mixtral(tmp_path / "hf", dtype, stacked=stacked, **({} if stacked else {"max_shard_size": "20KB"}))
    assert (len(list(source.glob("*.safetensors"))) > 3) != stacked
    convert("hf-to-openlm", source, tmp_path / "ours")
    stored = stored_dtypes(tmp_path / "ours")
    for name, found in stored.items():
        assert found == (torch.float32 if name.endswith("router.weight") else dtype), name
    router = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    names = "stacked" if stacked else "each"
    flags = ("--router-dtype", router, "--max-shard-size", "12KB", "--expert-names", names)
    convert("openlm-to-hf", tmp_path / "ours", tmp_path / "back", *flags)
    want, got = read_folder(source), read_folder(tmp_path / "back")
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name

    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(want)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in want.values())
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert [path.name for path in files] == sorted(set(index["weight_map"].values())) and len(files) > 3
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed <= {"dtype", "head_dim"}  # the dtype by its older name, and a default spelt out
    tokens = torch.randint(VOCAB, (1, 9))
    assert torch.equal(hf_logits(source, tokens), hf_logits(tmp_path / "back", tokens))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_router_stays_in_fp32_unless_asked_otherwise(mixtral, tmp_path):
    convert("hf-to-openlm", mixtral, tmp_path / "ours", "--dtype", "bf16")
    assert {str(d) for n, d in stored_dtypes(tmp_path / "ours").items() if "router" in n} == {"torch.float32"}
    assert {str(d) for n, d in stored_dtypes(tmp_path / "ours").items() if "router" not in n} == {"torch.bfloat16"}
    convert("openlm-to-hf", tmp_path / "ours", tmp_path / "back")
    original = read_folder(mixtral)
    for name, value in read_folder(tmp_path / "back").items():
        router = name.endswith("gate.weight")
        assert value.dtype == (torch.float32 if router else torch.bfloat16)
        assert torch.equal(value, original[name].to(value.dtype))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert("hf-to-openlm", mixtral, tmp_path / "all", "--dtype", "bf16", "--router-dtype", "bf16")
    assert {str(d) for d in stored_dtypes(tmp_path / "all").values()} == {"torch.bfloat16"}


def broken(mixtral, folder, change):
    """A copy of the Mixtral whose tensors `change` has changed."""
    from safetensors.torch import save_file

    shutil.copytree(mixtral, folder)
    tensors = read_folder(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w3.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [t.pop(GATE), t.pop(EXPERT)], f"lacks {EXPERT}, {GATE}; nothing was converted"),
        (
            lambda t: t.update({"model.extra": torch.ones(1), "b": torch.ones(1)}),
            "holds, without a use for them, b, model.extra;",
        ),
        (lambda t: t.update({GATE: t[GATE].T.contiguous()}), f"for {GATE} ((36, 5), not (5, 36))"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}), "stored as I8; only F64"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_every_tensor_is_used_once_or_listed(mixtral, tmp_path, capsys, change, words):
    folder = broken(mixtral, tmp_path / "hf", change)
    assert words in refusal(capsys, "hf-to-openlm", folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type is 'yarn'"),
        ({"sliding_window": CONTEXT - 1}, f"sliding_window is {CONTEXT - 1}, less than the context"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"num_local_experts": 2}, "top_k is 3 but there are only 2 experts"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_fields_are_named_before_a_tensor_is_read(mixtral, tmp_path, capsys, fields, words):
    shutil.copytree(mixtral, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"no weights at all")
    set_config(tmp_path / "hf", **fields)
    assert words in refusal(capsys, "hf-to-openlm", tmp_path / "hf", tmp_path / "ours")


def test_sliding_window_is_fine_where_it_hides_nothing(mixtral, tmp_path):
    shutil.copytree(mixtral, tmp_path / "hf")
    set_config(tmp_path / "hf", sliding_window=16)
    convert("hf-to-openlm", tmp_path / "hf", tmp_path / "ours", "--seq-len", 16)
    model = native(tmp_path / "ours")
    assert model.params.seq_len == 16
    tokens = torch.randint(VOCAB, (1, 16))
    with torch.no_grad():
        ours = model(tokens)
    theirs = hf_logits(tmp_path / "hf", tokens)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_fields_of_older_files(mixtral, tmp_path):
    """transformers 4 writes rope_theta, and leaves other things out."""
    shutil.copytree(mixtral, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name in ("rope_parameters", "head_dim", "router_jitter_noise"):
        config.pop(name, None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rope_theta": 321.0, "torch_dtype": "float32"}))
    convert("hf-to-openlm", tmp_path / "hf", tmp_path / "ours")
    assert native(tmp_path / "ours").params.rope_theta == 321.0


def test_nothing_is_left_of_a_failure(mixtral, tmp_path, capsys, monkeypatch):
    """Reading fails in the middle, or writing at the end."""
    from openlm_moe.convert import openlm_to_hf
    from openlm_moe.convert.hf_folder import Weights

    read = Weights.read

    def failing(self, name):
        if name == EXPERT:
            raise OSError("disk")
        return read(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(Weights, "read", failing)
        assert "cannot be written: disk" in refusal(capsys, "hf-to-openlm", mixtral, tmp_path / "ours")
    assert not list(tmp_path.iterdir())

    convert("hf-to-openlm", mixtral, tmp_path / "ours")
    with monkeypatch.context() as patched:
        patched.setattr(openlm_to_hf, "carry", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        assert "back cannot be written: disk" in refusal(capsys, "openlm-to-hf", tmp_path / "ours", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert "ours exists already" in refusal(capsys, "hf-to-openlm", mixtral, tmp_path / "ours")


def test_folders_that_are_none(mixtral, tmp_path, capsys):
    assert "has no config.json" in refusal(capsys, "hf-to-openlm", tmp_path, tmp_path / "ours")
    shutil.copytree(mixtral, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "elsewhere")
    assert "has neither model.safetensors nor" in refusal(capsys, "hf-to-openlm", tmp_path / "hf", tmp_path / "ours")
    index = {"weight_map": {"a": "../elsewhere"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names the file '../elsewhere'" in refusal(capsys, "hf-to-openlm", tmp_path / "hf", tmp_path / "ours")
    assert "does not exist" in refusal(capsys, "openlm-to-hf", tmp_path / "none", tmp_path / "back")


def test_trains_from_it_and_back(mixtral, tmp_path):
    """The trainer's first loss is transformers' own, and what it saves exports again."""
    from transformers import MixtralForCausalLM

    samples = torch.randint(VOCAB, (8, 17))
    write_shard(tmp_path / "data" / "0.tar", samples.numpy())
    write_manifest(tmp_path / "data" / "manifest.jsonl", [("0", len(samples))])
    ours = tmp_path / "ours"
    convert("hf-to-openlm", mixtral, ours, "--seq-len", 16)
    flags = f"--model {ours / 'model.json'} --pretrained {ours} --dataset-manifest {tmp_path / 'data/manifest.jsonl'}"
    flags += f" --train-num-samples {8 * 16} --epochs 2 --global-batch-size 8 --workers 0 --precision fp32 --lr 1e-2"
    flags += f" --multiple-data-passes --warmup 1 --logs {tmp_path / 'logs'} --name run --log-every-n-steps 1"
    assert train(flags.split()) == 0
    run = tmp_path / "logs" / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    model = MixtralForCausalLM.from_pretrained(mixtral, experts_implementation="eager")
    assert losses[0] == pytest.approx(model(samples, labels=samples).loss.item(), rel=1e-5)
    assert losses[1] < losses[0]

    convert("openlm-to-hf", run, tmp_path / "tuned", "--tokenizer", mixtral)
    tokens = samples[:2, :16]
    tuned = hf_logits(tmp_path / "tuned", tokens)
    model = native(run, ours / "model.json")
    with torch.no_grad():
        assert (model(tokens) - tuned).abs().max() <= 1e-5 * tuned.abs().max()
    assert (tuned - hf_logits(mixtral, tokens)).abs().max() > 1e-2 * tuned.abs().max()
    assert (tmp_path / "tuned" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)  # by the config beside the tokenizer
