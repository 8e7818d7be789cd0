"""An upcycled model computes what the dense one did."""

import pytest
import torch

from openlm_moe import MoEConfig
from openlm_moe.convert.__main__ import main
from openlm_moe.hosts.builtin.model import Transformer
from openlm_moe.hosts.builtin.params import ModelParams

PARAMS = ModelParams(dim=24, n_layers=3, n_heads=2, seq_len=16, vocab_size=50)


@pytest.fixture
def dense(tmp_path):
    model = Transformer(PARAMS, MoEConfig(num_experts=0)).double()
    model.init_weights(0)
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, tmp_path / "dense.pt")
    return model


def upcycled(folder, *flags, **settings):
    out = folder / "moe.pt"
    assert main(["upcycle", str(folder / "dense.pt"), str(out), *flags]) == 0
    model = Transformer(PARAMS, MoEConfig(ffn="swiglu", normalize_weights=True, **settings)).double()
    model.load_state_dict(torch.load(out, weights_only=True)["state_dict"])
    return model


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (("--experts", "8"), dict(num_experts=8, top_k=2)),
        (("--experts", "4", "--moe-every", "1"), dict(num_experts=4, top_k=3, every=1)),
        (("--experts", "8", "--split", "4"), dict(num_experts=8, top_k=4, ffn_dim=64)),
        (("--experts", "8", "--split", "2"), dict(num_experts=8, top_k=4, ffn_dim=128)),
    ],
    ids=str,
)
def test_outputs_equal_the_dense_models(dense, tmp_path, flags, settings, capsys):
    tokens = torch.randint(0, 50, (2, 16))
    want, got = dense(tokens), upcycled(tmp_path, *flags, **settings)(tokens)
    assert (got - want).norm() <= 1e-6 * want.norm()  # the router's weights are fp32
    assert "--moe-normalize-weights" in capsys.readouterr().out


def test_noise_tells_the_experts_apart(dense, tmp_path):
    model = upcycled(tmp_path, "--experts", "4", "--noise", "0.1", num_experts=4)
    w1 = model.layers[0].feed_forward.experts.w1
    relative = ((w1[0] - w1[1]).std() / w1.std()).item()
    assert relative == pytest.approx(0.1 * 2**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--experts", "8", "--split", "3"), "--split 3 does not divide --experts 8"),
        (("--experts", "0"), "nothing to do"),
    ],
)
def test_refusals(dense, tmp_path, flags, words, capsys):
    assert main(["upcycle", str(tmp_path / "dense.pt"), str(tmp_path / "moe.pt"), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "moe.pt").exists()
