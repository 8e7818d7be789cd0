"""The flag table: it covers MoEConfig, keeps open_lm's names, and says what is wrong."""

from dataclasses import fields

import pytest

from openlm_moe.config import MoEConfig
from openlm_moe.options import MOE_OPTIONS, Parser, add_options, markdown_table, moe_config_from


def parse(*argv):
    parser = Parser(prog="test")
    add_options(parser, MOE_OPTIONS)
    return moe_config_from(parser.parse_args(argv))


def test_every_setting_has_exactly_one_flag_with_its_default():
    assert sorted(o.field for o in MOE_OPTIONS) == sorted(f.name for f in fields(MoEConfig))
    assert parse() == MoEConfig()


def test_open_lms_names():
    spelled = {"freq": 2, "num-experts": 4, "top-k": 1, "capacity-factor": 1.5, "loss-weight": 0.01}
    argv = [word for name, value in spelled.items() for word in (f"--moe-{name}", str(value))]
    assert parse(*argv) == MoEConfig(every=2, num_experts=4, top_k=1, capacity_factor=1.5, loss_weight=0.01)


def test_lists_and_switches():
    config = parse("--moe-layers", "1,3,5", "--moe-normalize-weights")
    assert config.layers == (1, 3, 5)
    assert config.normalize_weights


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--expert", "8"], "unknown argument --expert; did you mean --experts?"),
        (["--moe-layers", "1,x"], "'1,x' is not a comma-separated list of layer ids"),
        (["--moe-ffn", "relu"], "invalid choice: 'relu'"),
        (["--zzzzqq"], "unknown argument --zzzzqq; --help lists all of them"),
    ],
)
def test_one_line_and_exit_code_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_the_table_names_every_flag_and_alias():
    table = markdown_table(MOE_OPTIONS)
    for option in MOE_OPTIONS:
        assert f"`{option.flag}`" in table
        assert all(f"`{alias}`" in table for alias in option.aliases)
    assert len(table.splitlines()) == len(MOE_OPTIONS) + 2
