"""dMoE with 8 experts beats the dense model of equal active FLOPs; the balancing loss balances: records, and anew."""

import pytest

from results import canary


def assert_sings(moe, no_balance, dense):
    assert moe["valid_loss"] < dense["valid_loss"]
    assert moe["max_over_mean"] < no_balance["max_over_mean"]


def test_the_records_of_three_seeds():
    by = {(r["arm"], r["seed"]): r for r in canary.committed()}
    assert by.keys() == {(arm, seed) for arm in canary.ARMS for seed in canary.SEEDS}
    for seed in canary.SEEDS:
        assert_sings(by["moe", seed], by["no_balance", seed], by["dense", seed])


def test_the_arms_have_equal_active_flops():
    from openlm_moe.hosts.builtin.args import OPTIONS
    from openlm_moe.options import Parser, add_options, moe_config_from

    def active(arm):
        parser = Parser()
        add_options(parser, OPTIONS)
        config = moe_config_from(parser.parse_args(canary.ARMS[arm]))
        return config.top_k * config.hidden_dim(canary.DIM)

    assert active("moe") == active("no_balance") == active("dense")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_another_seed():
    assert_sings(*(canary.run(arm, 3) for arm in ("moe", "no_balance", "dense")))
