"""Our layers in an installed, unmodified open_lm. Skipped where open_lm cannot be imported: `make test-open-lm`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("program.py")
MOE = ("--moe-every", "2", "--experts", "4", "--moe-balance-scope", "sequence", "--seed", "1")
pytestmark = [
    pytest.mark.open_lm,
    pytest.mark.skipif(
        importlib.util.find_spec("open_lm") is None,
        reason="open_lm is not installed; make test-open-lm OPEN_LM_SOURCE=<checkout> runs these",
    ),
]


@pytest.fixture(scope="module")
def trained(run, torchrun, tmp_path_factory):
    """`trained(processes, *flags)`: what the program recorded of 3 SGD steps; each command runs once."""
    done = {}

    def train(processes, *flags):
        if (processes, flags) not in done:
            out = tmp_path_factory.mktemp("open_lm") / "out.pt"
            command = (PROGRAM, out, 3, *flags)
            if processes == 1:
                result = run([sys.executable, "-W", "ignore", *command])
            else:
                result = torchrun(processes, *command, "--dist-backend", "gloo")
            assert result.returncode == 0, result.stderr[-3000:]
            done[processes, flags] = torch.load(out, weights_only=True)
        return done[processes, flags]

    return train


def assert_same_training(got, want, bound=1e-5):
    assert got["ok"] and want["ok"]
    assert got["state"].keys() == want["state"].keys()
    for name, weight in want["state"].items():
        assert (got["state"][name] - weight).norm() <= bound * weight.norm().clamp(min=1e-2), name
    for name in ("train/loss", "train/load_balancing_loss"):
        torch.testing.assert_close(got["scalars"][name], want["scalars"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ("--accum-freq", "2"),
        ("--accum-freq", "4", "--grad-checkpointing"),
        ("--grad-checkpointing",),
        ("--averagers", "ema_0.9", "--log-avg-model-training-loss", "1"),
    ],
    ids=" ".join,
)
def test_accumulation_checkpointing_and_averagers_change_nothing(trained, flags):
    assert_same_training(trained(1, *MOE, *flags), trained(1, *MOE))


@pytest.mark.parametrize(
    "flags",
    [
        ("--fsdp",),
        ("--fsdp", "--fsdp-use-orig-params"),
        ("--fsdp", "--expert-parallel", "2"),
        ("--fsdp", "--moe-expert-model-parallelism", "--accum-freq", "2"),
        ("--fsdp", "--expert-parallel", "2", "--grad-checkpointing"),
    ],
    ids=" ".join,
)
def test_fsdp_with_and_without_expert_parallelism_equals_one_process(trained, flags):
    got = trained(2, *MOE, *flags, "--grad-clip-norm", "1000")
    assert_same_training(got, trained(1, *MOE))
    first, second = got["norms"]
    assert first == second
    assert all(norm > 0 for norm in first)
    experts = got["state"]["layers.0.feed_forward.experts.w1"]
    assert all(not torch.equal(experts[a], experts[b]) for a, b in itertools.combinations(range(4), 2))


def test_clipping_under_expert_parallelism_equals_fsdp_alone(trained):
    clipped = (*MOE, "--grad-clip-norm", "0.1", "--fsdp")
    assert_same_training(trained(2, *clipped, "--expert-parallel", "2"), trained(2, *clipped))


def test_logged_loss_is_cross_entropy_and_the_balancing_loss_its_own(trained):
    heavy, light = (trained(1, *MOE, "--moe-loss-weight", weight)["scalars"] for weight in ("0.1", "0"))
    assert heavy["train/loss"][0] == pytest.approx(light["train/loss"][0], rel=1e-6)
    assert 0.1 <= heavy["train/load_balancing_loss"][0] < 0.4
    assert light["train/load_balancing_loss"] == [0, 0, 0]


def test_open_lms_own_flags_mean_the_same(trained):
    theirs = ("--moe-freq", "2", "--moe-num-experts", "4", "--moe-top-k", "2", "--moe-loss-weight", "0.1")
    assert_same_training(trained(1, *theirs, "--moe-balance-scope", "sequence", "--seed", "1"), trained(1, *MOE))


@pytest.mark.parametrize("flags", [("--moe-layers", "1"), ("--experts", "0"), ("--moe-type", "capacity")], ids=" ".join)
def test_other_placements_train(trained, flags):
    state = trained(1, *MOE, *flags)["state"]
    where = [name for name in state if name.endswith("feed_forward.router.weight")]
    assert where == {"--moe-layers": ["layers.1.feed_forward.router.weight"], "--experts": []}.get(
        flags[0], ["layers.0.feed_forward.router.weight"]
    )


def test_the_models_json_places_the_layers(trained, tmp_path):
    import open_lm

    path = Path(open_lm.__file__).parent / "model_configs" / "open_lm_test_tiny.json"
    file = tmp_path / "every_one.json"
    file.write_text(json.dumps({**json.loads(path.read_text()), "moe_freq": 1, "moe_num_experts": 3}))
    state = trained(1, *MOE, "--model", str(file))["state"]
    assert [state[f"layers.{i}.feed_forward.experts.w1"].shape[0] for i in range(2)] == [3, 3]


@pytest.mark.parametrize(
    ("json_values", "flags"),
    [
        ({}, ()),
        ({"model_norm": "gain_only_layer_norm", "qk_norm": True}, ()),
        ({"positional_embedding_type": "head_rotary", "model_norm": "rms_norm"}, ()),
        ({"positional_embedding_type": "llama_rotary", "ffn_type": "gelu"}, ()),
        ({"weight_tying": True, "post_embed_norm": True, "ffn_type": "swiglu_torch"}, ()),
        ({}, ("--experts", "4")),
        ({"model_norm": "gain_only_lp_layer_norm"}, ("--experts", "4", "--moe-ffn", "swiglu")),
    ],
    ids=str,
)
def test_the_built_in_host_and_open_lm_agree_on_logits_and_training(tmp_path, json_values, flags):
    """Same JSON, same weights, same tokens: logits to 1e-5 in fp32, and losses of 3 SGD steps."""
    import openlm_moe
    from openlm_moe.hosts.builtin.model import Transformer
    from openlm_moe.hosts.builtin.params import load_model_params

    shape = dict(
        hidden_dim=32, n_layers=3, n_heads=4, seq_len=16, vocab_size=40, post_embed_norm=False, weight_tying=False
    )
    file = tmp_path / "agreement.json"
    file.write_text(json.dumps({**shape, **json_values}))
    openlm_moe.register_open_lm(openlm_moe.MoEConfig(num_experts=0))
    try:
        from open_lm.model import create_model
        from open_lm.params import parse_args

        torch.manual_seed(0)
        theirs = create_model(
            parse_args(["--model", str(file), "--attn-name", "torch_attn", "--moe-every", "2", *flags])
        )
        config = openlm_moe.hosts.open_lm._plugin.layers
    finally:
        openlm_moe.unregister_open_lm()
    ours = Transformer(load_model_params(str(file)), config)
    own = ours.state_dict().keys()
    ours.load_state_dict({name: value for name, value in theirs.state_dict().items() if name in own})
    assert {n for n, _ in ours.named_parameters()} <= theirs.state_dict().keys()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    tokens = torch.randint(0, 40, (3, 4, 17))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    for batch in tokens:
        logits = [theirs(batch[:, :-1])[0], ours(batch[:, :-1])]
        assert (logits[1] - logits[0]).norm() <= 1e-5 * logits[0].norm()
        losses = [torch.nn.functional.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten()) for out in logits]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_unregister_restores_every_name():
    import openlm_moe
    from openlm_moe.hosts import open_lm as adapter

    modules = adapter._import_upstream()

    def bound():
        return {full: getattr(modules[full.rpartition(".")[0]], full.rpartition(".")[2]) for full in adapter.REPLACED}

    before = bound()
    openlm_moe.register_open_lm()
    assert bound() != before
    with pytest.raises(openlm_moe.UserError, match="registered in open_lm already"):
        openlm_moe.register_open_lm()
    openlm_moe.unregister_open_lm()
    assert bound() == before


def test_the_whole_command_trains_resumes_and_evaluates(torchrun, tmp_path):
    """open_lm's own main: shards, epochs, checkpoints, resume, evaluation, with one process and two under FSDP."""
    from openlm_moe.data.shards import write_shard

    samples = list(torch.randint(0, 16, (240, 17), generator=torch.Generator().manual_seed(0)).numpy())
    manifest = []
    for number in range(6):
        name = f"{number:08d}"
        write_shard(tmp_path / f"{name}.tar", samples[40 * number : 40 * (number + 1)])
        manifest.append(json.dumps({"shard": name, "num_sequences": 40}))
    (tmp_path / "manifest.jsonl").write_text("\n".join(manifest) + "\n")
    command = [
        *("-m", "--", "openlm_moe.main", "--host", "open_lm", "--moe-every", "2", "--experts", "4"),
        *("--model", "open_lm_test_tiny", "--precision", "fp32", "--attn-name", "torch_attn", "--workers", "1"),
        *("--dataset-manifest", tmp_path / "manifest.jsonl", "--data-key", "json.gz", "--global-batch-size", "8"),
        *("--train-num-samples", "640", "--lr", "1e-2", "--warmup", "2", "--log-every-n-steps", "1"),
        *("--val-data", tmp_path / "00000002.tar", "--val-data-key", "json.gz", "--logs", tmp_path / "logs"),
        *("--dist-backend", "gloo"),
    ]
    for processes, flags in ((1, ()), (2, ("--fsdp", "--expert-parallel", "2"))):
        whole, resumed = (tmp_path / "logs" / f"{name}{processes}" / "checkpoints" for name in ("whole", "resumed"))
        first = torchrun(processes, *command, *flags, "--epochs", "4", "--name", whole.parent.name)
        assert first.returncode == 0, first.stderr[-3000:]
        resumed.mkdir(parents=True)
        for file in ("epoch_1.pt", "optimizer_1.pt"):
            shutil.copy(whole / file, resumed)
        second = torchrun(
            processes, *command, *flags, "--epochs", "4", "--name", resumed.parent.name, "--resume", "latest"
        )
        assert second.returncode == 0, second.stderr[-3000:]
        last = max(int(file.stem.removeprefix("epoch_")) for file in whole.glob("epoch_*.pt"))
        assert last > 1
        early, unbroken, continued = (
            torch.load(folder / f"epoch_{n}.pt", weights_only=True)
            for folder, n in ((whole, 1), (whole, last), (resumed, last))
        )
        assert 0 < early["step"] < unbroken["step"] == continued["step"]
        for key, value in unbroken["state_dict"].items():
            assert torch.equal(continued["state_dict"][key], value), key
            if key.endswith(("w1", "w2")):
                assert value.shape[0] == 4
                assert all(not torch.equal(value[e], early["state_dict"][key][e]) for e in range(4)), key
        assert len((whole / "results.jsonl").read_text().splitlines()) == last


def test_help_shows_both_hosts_flags(run):
    printed = run([sys.executable, "-W", "ignore", "-m", "openlm_moe.main", "--host", "open_lm", "--help"]).stdout
    for flag in ("--experts", "--moe-freq", "--moe-balance-scope", "--expert-parallel", "--dataset-manifest"):
        assert flag in printed
