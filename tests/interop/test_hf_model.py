"""Training a Hugging Face model with our experts: transformers' own training, step by step, and back to its format."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from openlm_moe.data.evaluation import open_evaluation
from openlm_moe.interop import hf_model, hf_model_files
from openlm_moe.main import main
from openlm_moe.parallel import Checkpointer

pytest.importorskip("transformers", minversion="5.0")

TRAINED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
LOSS, AUXILIARY = "train/loss", "train/load_balancing_loss"
SEQ_LEN, BATCH, STEPS = 24, 8, 20


def close(got, want, relative):
    assert len(got) == len(want)
    assert list(got) == pytest.approx(list(want), rel=relative)


def logits_of(folder, tokens, implementation):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation)
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.fixture(scope="module")
def trained(hf_case):
    """`trained(family)`: its case, with the 20 steps of run "run" done."""
    done = {}

    def train(family):
        if family not in done:
            done[family] = hf_case(family)
            assert done[family].start("--save-every-n-steps", 10) == 0
        return done[family]

    return train


@pytest.mark.parametrize("family", TRAINED)
def test_twenty_steps_are_those_of_transformers_own_training(trained, family):
    case = trained(family)
    losses, auxiliary = case.eager()
    got = list(case.metric(LOSS).values())
    assert got[0] == pytest.approx(losses[0], rel=1e-6)
    close(got, losses, 1e-5)
    close(case.metric(AUXILIARY).values(), auxiliary, 1e-5)
    assert losses[-1] < 0.97 * losses[0]  # it is training that is compared


@pytest.mark.parametrize("family", TRAINED)
def test_the_saved_folder_is_the_trained_model(trained, family):
    case = trained(family)
    described = hf_model.describe(case.model, SEQ_LEN)
    model = hf_model.HFModel(hf_model_files.load(case.model, described.config)).eval()
    reader = Checkpointer(case.folder / "run" / "checkpoints")
    reader.load(case.folder / "run" / "checkpoints" / f"step_{STEPS:07d}", model, None)
    reader.close()
    tokens = case.batches(1)[0][:, :-1]
    with torch.no_grad():
        want = model(tokens)
    assert torch.equal(logits_of(case.exported(), tokens, "openlm_moe"), want)
    own = logits_of(case.exported(), tokens, "eager")
    assert (own - want).norm() < 1e-5 * want.norm()
    assert (logits_of(case.model, tokens, "eager") - want).norm() > 1e-2 * want.norm()  # training moved it


def test_the_saved_folder_has_what_the_first_one_had(trained):
    case = trained("mixtral")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (case.exported() / name).read_bytes() == (case.model / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (case.model, case.exported()))
    assert before == after
    names = []
    for folder in (case.model, case.exported()):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
    assert any(re.search(r"experts\.0\.w1\.weight", name) for name in names[1])  # as published, an expert each
    assert [path.name for path in sorted(case.exported().parent.iterdir())] == ["step_0000020"]
    closing = (case.folder / "run" / "out.log").read_text()
    assert re.search(rf"Hugging Face model +{re.escape(str(case.exported()))}$", closing, re.MULTILINE)


def test_resuming_repeats_the_steps_exactly(trained, tmp_path):
    case = trained("mixtral")
    again = replace(case, folder=tmp_path)
    shutil.copytree(case.folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_0000020")
    shutil.rmtree(tmp_path / "run" / "hf")
    assert again.start("--save-every-n-steps", 10, "--resume", "latest") == 0
    assert again.metric(LOSS) == case.metric(LOSS)
    one, two = (load_file(c.exported() / "model.safetensors") for c in (case, again))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_validation_is_the_saved_model_and_can_be_repeated(trained):
    case = trained("mixtral")
    final = case.folder / "run" / "checkpoints" / f"step_{STEPS:07d}"
    again = f"--hf-model {case.model} --hf-seq-len {SEQ_LEN} --val-data {case.data} --val-num-samples {8 * SEQ_LEN}"
    assert main(f"{again} --resume {final} --logs {case.folder} --name evaluated --workers 0".split()) == 0
    (loss,) = case.metric("valid/shards/loss", "evaluated").values()
    (sample,) = open_evaluation([str(case.data)], seq_len=SEQ_LEN, vocab_size=320, max_samples=8)
    tokens = torch.cat([batch["tokens"] for batch in sample.batches(8)])
    logits = logits_of(case.exported(), tokens[:, :-1], "eager")
    assert loss == pytest.approx(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item(), rel=1e-5)


def test_accumulation_and_recomputation_change_nothing_else(hf_case):
    case = hf_case("qwen3_moe")
    flags = ("--accum-freq", 2, "--grad-checkpointing", "--hf-save", "checkpoints", "--save-every-n-steps", 2)
    assert case.start(*flags, "--keep-last", 2, name="parts", steps=6) == 0
    losses, auxiliary = case.eager(parts=2, steps=6)
    close(case.metric(LOSS, "parts").values(), losses, 1e-5)
    close(case.metric(AUXILIARY, "parts").values(), auxiliary, 1e-5)
    saved = sorted(path.name for path in (case.folder / "parts" / "hf").iterdir())
    assert saved == ["step_0000004", "step_0000006"]


def test_load_and_size_are_those_of_the_model(trained):
    case = trained("qwen2_moe")
    described = hf_model.describe(case.model, SEQ_LEN)
    config = described.config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.model)
    total = sum(p.numel() for p in model.parameters())
    one_expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * one_expert
    assert (described.count.total, described.count.active) == (total, total - idle)
    norms = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    head_dim = config.hidden_size // config.num_attention_heads
    scores = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim * (SEQ_LEN + 1)
    matrices = total - idle - norms - model.get_input_embeddings().weight.numel()
    assert described.flops_per_token == 3 * (2 * matrices + scores)
    assert described.moe.moe_layer_ids(config.num_hidden_layers) == (0, 1)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_load_is_what_the_router_chose_also_where_layers_are_computed_twice(hf_case, family):
    case = hf_case(family)
    described = hf_model.describe(case.model, SEQ_LEN)
    model = hf_model.HFModel(hf_model_files.load(case.model, described.config)).train()
    model.set_grad_checkpointing()
    tokens = case.batches(1)[0][:, :-1]
    with hf_model.collect_hf_losses(model) as losses:
        model(tokens).mean().backward()
    router_logits = model.model(tokens, output_router_logits=True).router_logits
    assert losses.per_layer.keys() == hf_model.layer_ids(model).keys()
    assert list(hf_model.layer_ids(model).values()) == [0, 1]
    for stats, logits in zip(losses.per_layer.values(), router_logits, strict=True):
        chosen = logits.topk(described.moe.top_k, dim=-1).indices.flatten()
        assert torch.equal(stats.tokens_per_expert_E, torch.bincount(chosen, minlength=described.moe.num_experts))


@pytest.mark.distributed
def test_two_ranks_with_fsdp_equal_one_process(hf_case, torchrun):
    case = hf_case("mixtral")
    flags = ("--grad-clip-norm", 1.0)
    assert case.start(*flags, "--accum-freq", 2, name="one", steps=6) == 0
    sharded = case.flags(*flags, "--fsdp", name="two", steps=6)
    done = torchrun(2, "-m", "--", "openlm_moe.main", *sharded)
    assert done.returncode == 0, done.stderr
    for key in (LOSS, AUXILIARY, "train/grad_norm"):
        close(case.metric(key, "two").values(), case.metric(key, "one").values(), 1e-5)
    one, two = (load_file(case.exported(name, 6) / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name] - two[name]).norm() <= 1e-4 * one[name].norm(), name


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "settings", "flags"),
    [
        ("qwen3_moe", {"tie_word_embeddings": True}, ("--fsdp", "--grad-checkpointing")),
        ("olmoe", {}, ()),
        ("gpt_oss", {}, ("--fsdp", "--accum-freq", 2)),
        ("deepseek_v3", {}, ("--fsdp",)),
    ],
)
def test_two_ranks_of_other_kinds_equal_one_process(hf_case, torchrun, family, settings, flags):
    case = hf_case(family, **settings)
    parts = 2 * (flags[-1] if "--accum-freq" in flags else 1)
    assert case.start("--accum-freq", parts, name="one", steps=6) == 0
    done = torchrun(2, "-m", "--", "openlm_moe.main", *case.flags(*flags, name="two", steps=6))
    assert done.returncode == 0, done.stderr
    for key in (LOSS, AUXILIARY):
        close(case.metric(key, "two").values(), case.metric(key, "one").values(), 1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_in_bf16_stay_near_and_resume_in_one_process(hf_case, torchrun):
    case = hf_case("mixtral")
    assert case.start("--accum-freq", 2, name="fp32", steps=6) == 0
    flags = case.flags("--fsdp", "--fsdp-amp", "--save-every-n-steps", 3, name="amp", steps=6)
    done = torchrun(2, "-m", "--", "openlm_moe.main", *flags)
    assert done.returncode == 0, done.stderr
    close(case.metric(LOSS, "amp").values(), case.metric(LOSS, "fp32").values(), 1e-2)
    middle = case.folder / "amp" / "checkpoints" / "step_0000003"
    assert case.start("--accum-freq", 2, "--resume", middle, name="back", steps=6) == 0
    close(case.metric(LOSS, "back").values(), list(case.metric(LOSS, "amp").values())[3:], 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "phimoe", "minimax", "jamba"])
def test_other_families_too(hf_case, family):
    case = hf_case(family, **({"router_jitter_noise": 0.0, "input_jitter_noise": 0.0} if family == "phimoe" else {}))
    assert case.start(name="other", steps=5) == 0
    losses, auxiliary = case.eager(steps=5)
    close(case.metric(LOSS, "other").values(), losses, 1e-5)
    close(case.metric(AUXILIARY, "other").values(), auxiliary, 1e-5)
