"""MegaBlocks' weights, in both of its layouts, compute by MegaBlocks' formula after conversion."""

import pytest
import torch
import torch.nn.functional as F

from openlm_moe import MoEConfig, build_moe
from openlm_moe.convert.__main__ import main

E, D, HIDDEN = 3, 6, 10
PREFIX = "layers.2.feed_forward"


def megablocks(flat):
    """A checkpoint as open_lm saves it, and the formula of MegaBlocks' layer with these weights."""
    torch.manual_seed(0)
    router, w1, w2 = (torch.randn(*shape, dtype=torch.double) for shape in ((E, D), (E, D, HIDDEN), (E, HIDDEN, D)))
    stored = (w1.transpose(1, 2).reshape(-1, D), w2.reshape(-1, D)) if flat else (w1, w2)
    state = {
        "module.tok_embeddings.weight": torch.randn(5, D),
        f"module.{PREFIX}.router.layer.weight": router,
        f"module.{PREFIX}.experts.mlp.w1": stored[0],
        f"module.{PREFIX}.experts.mlp.w2": stored[1],
        f"module.{PREFIX}.experts.bias": torch.randn(D),
    }

    def formula(x):
        weights, ids = (x @ router.T).softmax(-1).topk(2, dim=-1)
        rows = []
        for t in range(len(x)):
            parts = [F.gelu(x[t] @ w1[e], approximate="tanh") @ w2[e] for e in ids[t]]
            rows.append(weights[t, 0] * parts[0] + weights[t, 1] * parts[1])
        return torch.stack(rows)

    return {"epoch": 3, "name": "theirs", "state_dict": state, "step": 7}, formula


@pytest.mark.parametrize("flat", [False, True], ids=["capacity MLP", "dropless MLP"])
def test_outputs_equal_the_formula(flat, tmp_path, capsys):
    checkpoint, formula = megablocks(flat)
    torch.save(checkpoint, tmp_path / "in.pt")
    assert main(["megablocks-to-openlm", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 0
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (found["epoch"], found["step"]) == (3, 7)
    state = found["state_dict"]
    assert torch.equal(state["tok_embeddings.weight"], checkpoint["state_dict"]["module.tok_embeddings.weight"])
    layer = build_moe(D, 2, MoEConfig(num_experts=E, ffn_dim=HIDDEN)).double()
    layer.load_state_dict({k.removeprefix(f"{PREFIX}."): v for k, v in state.items() if k.startswith(PREFIX)})
    x = torch.randn(20, D, dtype=torch.double)
    assert (layer(x) - formula(x)).norm() <= 1e-12 * formula(x).norm()
    printed = capsys.readouterr().out
    assert "each of 5 tensors used once" in printed
    assert f"{PREFIX}.experts.bias: left out" in printed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop(f"module.{PREFIX}.router.layer.weight"), "its experts cannot be counted"),
        (lambda s: s.update({f"module.{PREFIX}.experts.mlp.w1": torch.ones(7, D)}), r"has shape \(7, 6\)"),
        (lambda s: [s.pop(k) for k in list(s) if "feed_forward" in k], "holds no MegaBlocks layer"),
    ],
)
def test_what_it_does_not_know_is_refused_and_nothing_written(change, words, tmp_path, capsys):
    import re

    checkpoint, _ = megablocks(True)
    change(checkpoint["state_dict"])
    torch.save(checkpoint, tmp_path / "in.pt")
    assert main(["megablocks-to-openlm", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out.pt").exists()
