"""The command line: open_lm's flags and meanings, presets, and one clear line for what is wrong."""

import json
import shlex

import pytest
from torch.distributed.run import get_args_parser

from openlm_moe import UserError
from openlm_moe.hosts.builtin import config_file, legacy
from openlm_moe.hosts.builtin.args import EMBEDDED_DEFAULTS, OPTIONS, build_parser, parse_args

# The training command of open_lm's MOE.md.
MOE_MD = """
    --train-num-samples 10000000000 --workers 2
    --dataset-manifest s3://a/manifest.jsonl s3://b/manifest.jsonl --train-data-mix-weights 0.725 0.275
    --precision amp_bfloat16 --batch-size 8 --accum-freq 4 --log-every-n-steps 20 --grad-clip-norm 1 --lr 5e-4
    --warmup 200 --model open_lm_41m --wd 0.1 --beta2 0.95 --epochs 50 --report-to wandb --moe-freq 2
    --moe-num-experts 8 --moe-top-k 2 --moe-capacity-factor 1.25 --moe-loss-weight 0.1 --disable-meta-device
    --wandb-project-name moe --name test1 --logs /tmp/experiments/moe --resume latest --seed 124 --data-key 'json'
    --fsdp --fsdp-amp --model-norm gain_only_layer_norm --lr-scheduler cosine --lr-cooldown-end 0.00001
"""

# Every flag of open_lm's params.py (commit 9bb92ef) that is not among those of MOE_MD.
OPEN_LM_FLAGS = """
    --train-data --train-data-upsampling-factors --val-data --val-num-samples --dataset-type --dataset-resampled
    --disable-buffer --log-local --global-batch-size --epochs-cooldown --optimizer --beta1 --eps --z-loss-coefficient
    --log-logit-mean --use-bn-sync --skip-scheduler --lr-cooldown-power --force-min-lr --save-frequency
    --save-most-recent --torchcompile --val-frequency --global-val-batch-size --val-data-key --val-seq-ci --val-tok-ci
    --val-max-pop-ci --val-iter-ci --hf-model --hf-seq-len --hf-fsdp-block --pretrained --load-pretrained-state
    --grad-checkpointing --torchscript --trace --dist-url --dist-backend --fsdp-cpu-offload --fsdp-use-orig-params
    --fsdp-pure-bf16 --fsdp-backward-prefetch --fsdp-hybrid --fsdp-hybrid-o2 --fsdp-checkpoint
    --fsdp-limit-all-gathers --wandb-notes --debug --average --average-coefficients --copy-codebase --ddp-static-graph
    --no-set-device-rank --remote-sync --remote-sync-frequency --remote-sync-protocol --delete-previous-checkpoint
    --distill-model --distill-pretrained --use-bnb-linear --target-mask-left --squash-mask-left
    --target-mask-individual --ignore-parse-errors --experimental-meta-device --force-distributed --preset-world-size
    --multiple-data-passes --averagers --log-avg-model-training-loss --data-tolerate-error-p --data-tolerate-num-ckpts
    --ffn-type --qk-norm --positional-embedding-type --moe-weight-parallelism --moe-expert-model-parallelism
    --attn-name --attn-activation --attn-seq-scalar --attn-seq-scalar-alpha --config
""".split()


def test_the_command_of_moe_md_is_read_as_open_lm_means_it():
    args = parse_args(shlex.split(MOE_MD))
    assert not args.embedded
    assert args.dataset_manifest == ["s3://a/manifest.jsonl", "s3://b/manifest.jsonl"]
    assert args.train_data_mix_weights == [0.725, 0.275]
    assert legacy.global_batch_size(args, world_size=8) == 64
    assert (args.moe.every, args.moe.num_experts, args.moe.top_k, args.moe.loss_weight) == (2, 8, 2, 0.1)
    assert (args.lr, args.lr_cooldown_end, args.warmup, args.wd) == (5e-4, 1e-5, 200, 0.1)
    assert args.notes == [f"--disable-meta-device has no effect: {legacy.NO_EFFECT['--disable-meta-device']}"]


def test_every_flag_of_open_lm_is_known_or_refused_with_what_replaces_it():
    known = build_parser().known_flags()
    for flag in OPEN_LM_FLAGS:
        assert (flag in known) != (flag in legacy.GONE), flag


@pytest.mark.parametrize("flag", sorted(legacy.GONE))
def test_gone_flags_say_what_replaces_them(flag):
    with pytest.raises(UserError, match=f"^{flag} is gone: {legacy.GONE[flag].split('(')[0][:20]}"):
        parse_args([flag, "1"])


def test_weight_parallelism_names_fsdp():
    with pytest.raises(UserError, match="FSDP does that job"):
        parse_args(["--moe-weight-parallelism"])


def test_an_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--expert", "8"])
    assert caught.value.code == 2
    assert "unknown argument --expert; did you mean --experts?" in capsys.readouterr().err


def test_torchrun_takes_every_flag_but_logs_after_the_module():
    parser = get_args_parser()
    for option in OPTIONS:
        for flag in (option.flag, *option.aliases):
            if flag == "--logs":
                continue
            words = [flag] if option.type is bool else [flag, "1"]
            assert parser.parse_args(["-m", "openlm_moe.main", *words]).training_script_args == words


def test_output_is_logs():
    assert parse_args(["--output", "/tmp/a"]).logs == parse_args(["--logs", "/tmp/a"]).logs == "/tmp/a"


def test_without_data_flags_the_embedded_values_hold_and_flags_win():
    args = parse_args("--moe-every 2 --experts 8".split())
    assert args.embedded
    assert {key: getattr(args, key) for key in EMBEDDED_DEFAULTS} == EMBEDDED_DEFAULTS
    assert parse_args(["--lr", "1"]).lr == 1
    with_data = parse_args(["--train-data", "a.tar"])
    assert not with_data.embedded
    assert (with_data.model, with_data.epochs, with_data.warmup) == ("open_lm_1b", 32, 10000)


def test_config_file_gives_defaults_that_flags_override(tmp_path):
    content = {
        "model": "open_lm_41m",
        "moe-num-experts": 4,
        "fsdp": True,
        "train_data": ["a.tar"],
        "moe-layers": [1, 3],
    }
    (tmp_path / "a.json").write_text(json.dumps({**content, "lr": 3}))
    lines = ["model: open_lm_41m", "moe-num-experts: 4", "fsdp: true", "train_data: a.tar", "moe-layers: 1,3", "lr: 3"]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    for name in ("a.json", "a.yaml"):
        args = parse_args(["--config", str(tmp_path / name), "--top-k", "1", "--moe-num-experts", "8"])
        assert (args.model, args.moe.num_experts, args.moe.top_k, args.fsdp) == ("open_lm_41m", 8, 1, True)
        assert (args.train_data, args.moe.layers, args.embedded) == (["a.tar"], (1, 3), False)
        assert args.lr == 3.0 and isinstance(args.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expert: 8", "unknown argument --expert; did you mean --experts"),
        ("experts: many", "--experts is 'many', which is not a int"),
        ("fsdp: 3", "--fsdp is 3; it must be true or false"),
        ("precision: fp8", "--precision is 'fp8'; it must be one of amp"),
        ("lr: [1, 2]", "--lr is a list; it must be one value"),
        ("moe-weight-parallelism: true", "is gone: FSDP does that job"),
        ("- a", "must hold a mapping of flags to values, not a list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_config_file(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_args(["--config", str(path)])
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(
        UserError, match="neither a file nor a preset; presets are " + (", ".join(config_file.presets()) or "none")
    ):
        parse_args(["--config", "no_such_preset"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--epochs 0", "--epochs is 0; it must be 1 or more"),
        ("--warmup -1", "--warmup is -1; it must be 0 or more"),
        ("--lr -1", "--lr is -1.0; it must be 0 or more"),
        ("--beta2 1", "--beta2 is 1.0"),
        ("--keep-last 0", "--keep-last is 0"),
        ("--grad-clip-norm 0", "--grad-clip-norm is 0.0; it must be above 0"),
        ("--grad-clip-norm nan", "--grad-clip-norm is nan; it must be above 0"),
        ("--lr inf", "--lr is inf; it must be 0 or more, and finite"),
        ("--lr-cooldown-end nan", "--lr-cooldown-end is nan; it must be 0 or more, and finite"),
        ("--moe-loss-weight inf", "loss_weight is inf; it must be 0 or more, and finite"),
        ("--moe-type capacity --moe-capacity-factor inf", "capacity_factor is inf; it must be above 0 and finite"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999; it must fit into 64 bits"),
        ("--train-data a --dataset-manifest b", "--train-data and --dataset-manifest both"),
        ("--lr-scheduler const-cooldown", "needs --epochs-cooldown"),
        ("--epochs 2 --epochs-cooldown 3", "more than --epochs 2"),
        ("--squash-mask-left", "needs --target-mask-left and --target-mask-individual"),
        ("--target-mask-left 3 --target-mask-individual 3", "are both 3; they must differ"),
        ("--fsdp-amp", "--fsdp-amp means nothing without --fsdp"),
        ("--fsdp --precision amp", "does not work with --fsdp; use amp_bf16"),
        ("--fsdp --fsdp-amp --fsdp-pure-bf16", "give one of them"),
        ("--fsdp --fsdp-hybrid --fsdp-hybrid-o2", "not both"),
        ("--delete-previous-checkpoint --keep-last 3", "means --keep-last 1, but --keep-last is 3"),
        ("--batch-size 0", "--batch-size is 0"),
        ("--resume latest --pretrained x", "give one of them"),
        ("--val-data a b --val-data-key json", "--val-data-key has 1 keys for 2 validation sets"),
        ("--experts 1 --top-k 2", "lower --top-k to at most 1"),
    ],
)
def test_values_that_do_not_fit_together(flags, message):
    with pytest.raises(UserError) as caught:
        parse_args(flags.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["0", "some", "-1"])
def test_expert_parallel_takes_a_number_auto_or_off(value, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--expert-parallel", value])
    assert "neither auto, off nor a number of ranks" in capsys.readouterr().err
    assert parse_args(["--expert-parallel", "4"]).expert_parallel == 4
    assert parse_args(["--moe-expert-model-parallelism"]).expert_parallel == "auto"
    assert parse_args(["--moe-expert-model-parallelism", "--expert-parallel", "2"]).expert_parallel == 2


def test_batch_size_counts_the_samples_of_a_rank():
    assert legacy.global_batch_size(parse_args(["--train-data", "a"]), 4) == 64
    assert legacy.global_batch_size(parse_args("--train-data a --batch-size 8".split()), 4) == 32
    with pytest.raises(UserError, match="both set the batch size"):
        legacy.global_batch_size(parse_args("--train-data a --batch-size 8 --global-batch-size 8".split()), 4)


def test_flags_and_destinations_are_unique():
    names = [name for o in OPTIONS for name in (o.flag, *o.aliases)]
    assert len(names) == len(set(names))
    assert len({o.dest for o in OPTIONS}) == len(OPTIONS)
